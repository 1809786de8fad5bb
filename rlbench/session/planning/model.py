"""A model as its ranks will hold it, made on meta from its config alone: exact counts, and what its passes take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlbench.defaults import BFLOAT16_FROM, precision
from rlbench.errors import BuildError
from rlbench.nn.lora import Adapted
from rlbench.nn.quantised import quantised_layers
from rlbench.session.options import POLICY
from rlbench.session.planning.pictures import Grid
from rlbench.session.planning.request import Request
from rlbench.strategies.sharding.tensor_parallel import split_parameters
from rlbench.trainers.models.policy_spec import PolicySpec, RewardSpec
from rlbench.trainers.models.scalar_model import ScalarHeadModel
from rlbench.trainers.passes.chunked_head import token_bytes
from rlbench.trainers.passes.cost import PassCost, PassPlan, pass_cost
from rlbench.trainers.passes.images import ImageReader
from rlbench.trainers.passes.meta_images import image_tokens, tower_peak
from rlbench.trainers.passes.micro_batches import plan_micro_batches
from rlbench.trainers.update.options import PolicyOptions

KEPT = 64
"""Passes that are remembered: the same ones are asked for again while a change is looked for."""


@dataclass(frozen=True)
class Held:
    """One parameter of a rank: its `shape`, the bytes of an entry as it is held (`item`), and whether it `trains`; one
    that is not `split` is held whole by every rank, as the numbers of a quantised weight are; one of a layer that ranks
    compute `together` is split over these first."""

    shape: tuple[int, ...]
    item: int
    trains: bool
    split: bool = True
    together: int = 1

    def local(self, shards: int) -> int:
        """Entries of one rank: rows are split, the last rank's are padded."""
        shards = shards if self.split else 1
        rows = -(-self.shape[0] // shards) if self.shape else 1
        rest = 1
        for size in self.shape[1:]:
            rest *= size
        return rows * rest

    def part(self, shards: int) -> int:
        """Entries of one rank, where layers are computed together too."""
        return -(-self.local(shards) // self.together)


class Spec(Protocol):
    """What a rank is sent to make a module of; calling it makes that, on meta."""

    @property
    def path(self) -> str: ...

    @property
    def trainable(self) -> bool: ...

    def __call__(self) -> Any: ...


@dataclass(frozen=True)
class Model:
    """A policy, a frozen reference, a critic or a reward model, on meta.

    Attributes:
        module: in the dtype it computes in.
        held: its parameters as a rank keeps them.
        config: of the language model.
        dtype: of `module`.
        adapters: entries of a LoRA.
        quantised: entries of the weights that are held in 4 or 8 bits, each.
        source: the folder or hub id of its config, and of its image processor.
        half: the half precision that passes compute in over other weights; None: as these are held.
    """

    module: nn.Module
    held: tuple[Held, ...]
    config: Any
    dtype: torch.dtype
    adapters: int = 0
    quantised: tuple[int, ...] = ()
    source: str = ""
    half: str | None = None

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def parameters(self) -> int:
        """All of them, adapters too; a quantised weight has as many as it stands for."""
        return sum(held.local(1) for held in self.held if held.split) + sum(self.quantised)

    @property
    def trained(self) -> int:
        """Those with a gradient."""
        return sum(held.local(1) for held in self.held if held.trains)

    @property
    def compute_item(self) -> int:
        """Bytes of an entry as passes see it."""
        return self.dtype.itemsize

    def micro_batch(self, request: Request) -> tuple[int, ...]:
        """Lengths of the rows of the fullest micro-batch of a rank; of rows that ranks split, of its slices."""
        split = request.train.sequence_parallel
        options = PolicyOptions(token_budget=request.token_budget)
        memory = request.devices.nbytes if request.devices.gpus else 0
        held = token_bytes(self.module, self.compute_item)
        budget = split * options.budget(int(self.config.vocab_size), held, memory)
        context = int(getattr(self.config, "max_position_embeddings", budget) or budget)
        if request.lengths is None or isinstance(request.lengths, int):
            length = request.longest or min(context, budget)
            rows, rest = divmod(max(budget, length), length)
            return tuple(-(-n // split) for n in (*[length] * rows, *([rest] if rest > 1 else [])))
        import numpy as np

        lengths = np.asarray(list(request.lengths), np.int64)
        plan = plan_micro_batches(lengths, max(1, request.data_ranks // split), budget)
        fullest = max((rows for steps in plan for rows in steps), key=lambda rows: int(lengths[rows].sum()))
        return tuple(-(-int(n) // split) for n in lengths[fullest])

    @property
    def scalar(self) -> bool:
        """Whether it gives one number of each token, in the place of logits."""
        return isinstance(self.module, ScalarHeadModel)

    @property
    def sees(self) -> bool:
        """Whether it takes images."""
        return ImageReader.of(self.module) is not None

    def grids(self, request: Request, rows: tuple[int, ...]) -> tuple[Grid, ...]:
        """Patches of each picture that such rows show; none where nothing is shown, or the model sees nothing. A row
        too short for its pictures, the last of a micro-batch, shows none. Raises BuildError where all are."""
        if request.images is None or not rows or not self.sees:
            return ()
        own = (request.images.grid(self.source),) * request.images.count
        tokens = self.image_tokens(own)
        showing = sum(length > tokens for length in rows)
        if not showing:
            raise BuildError(
                f"images={request.images} takes {tokens:,} tokens of a sequence, and the longest has {max(rows):,}: "
                "longer ones (lengths=), or fewer or smaller pictures"
            )
        return own * showing

    def image_tokens(self, grids: tuple[Grid, ...]) -> int:
        """Tokens that stand for pictures in a row."""
        return image_tokens(self.module, grids)

    def tower_peak(self, grids: tuple[Grid, ...]) -> int:
        """What its tower takes to encode pictures, without gradients."""
        return _tower_peak(self, grids)

    def cost(self, plan: PassPlan) -> PassCost:
        """What a pass takes; see `pass_cost`."""
        return _cost(self, plan)


@lru_cache(maxsize=KEPT)
def _cost(model: Model, plan: PassPlan) -> PassCost:
    return pass_cost(model.module, plan)


@lru_cache(maxsize=KEPT)
def _tower_peak(model: Model, grids: tuple[Grid, ...]) -> int:
    return tower_peak(model.module, grids)


def policy_of(request: Request) -> Model:
    """The policy of a plan, as its ranks would make it."""
    return _model(request, request.path, trains=True)


def frozen_of(request: Request) -> dict[str, Model]:
    """Its frozen policies that have weights of their own, by role."""
    return {role: _model(request, path, trains=False) for role, path in request.frozen.items()}


def stamp_of(path: str) -> int:
    """When a config was written, 0 of one that is not here."""
    config = Path(path) / "config.json"
    return config.stat().st_mtime_ns if config.is_file() else 0


def _model(request: Request, path: str, trains: bool) -> Model:
    """Make it, or take what was made of the same options and the same config; a GPU, or an optimizer that holds the
    masters, makes it compute in half precision where `bf16` and `fp16` say nothing."""
    train = request.train
    gpu = BFLOAT16_FROM if request.devices.gpus else None  # float16, of an older one, takes as much
    lora = train.lora if trains else None
    kind = PolicySpec if request.kind == POLICY else RewardSpec
    spec = kind(path, trains, dtype=train.dtype, lora=lora, gradient_checkpointing=train.gradient_checkpointing)
    asked, held = (train.bf16, train.fp16), (train.masters, train.use_mp_opt, train.tensor_parallel)
    return made(spec, gpu, asked, *held, stamp_of(path))


@lru_cache(maxsize=16)
def made(
    spec: Spec,
    gpu: tuple[int, int] | None,
    asked: tuple[bool | None, bool],
    masters: bool | None,
    in_optimizer: bool,
    together: int,
    stamp: int,
) -> Model:
    """Make a model as a rank holds it: `gpu`, of which compute capability; `asked`: `bf16` and `fp16`; `masters`: hold
    what trains in float32, None: where it does; `in_optimizer`: that is the optimizer's; `together`: ranks that compute
    its layers; `stamp`: of its config."""
    module: Any = spec()
    module.tie_weights()
    names = Adapted.of(module).adapter_names()
    adapters = sum(p.numel() for name, p in module.named_parameters() if name in names)
    masters = spec.trainable if masters is None else masters
    shared = split_parameters(module, together) if together > 1 else frozenset()
    held = [_held(p, masters, in_optimizer, together if name in shared else 1) for name, p in module.named_parameters()]
    packed = quantised_layers(module).values()
    held += [Held((b.numel(),), b.element_size(), False, False) for layer in packed for b in layer.buffers(False)]
    first = next(module.parameters()).dtype
    checkpoint, (bf16, fp16) = str(first).removeprefix("torch."), asked
    chosen = precision(gpu, checkpoint, bf16=bf16, fp16=fp16, in_optimizer=in_optimizer and masters)
    dtype = _trained_in(first, masters) if chosen.half is None else getattr(torch, chosen.half)
    module.to(dtype)
    sizes = tuple(layer.in_features * layer.out_features for layer in packed)
    text = module.config.get_text_config()
    return Model(module, tuple(held), text, dtype, adapters, sizes, spec.path, chosen.half)


def _held(parameter: Tensor, masters: bool, in_optimizer: bool, together: int) -> Held:
    """As `set_dtypes` leaves it: float32 where it trains, unless the optimizer holds that."""
    item = parameter.element_size()
    if parameter.requires_grad and masters:
        item = 2 if in_optimizer else max(4, item)
    return Held(tuple(parameter.shape), item, parameter.requires_grad, together=together)


def _trained_in(checkpoint: torch.dtype, masters: bool) -> torch.dtype:
    return torch.float32 if masters and checkpoint.itemsize < 4 else checkpoint
