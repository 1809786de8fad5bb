"""A checkpoint's backbone under a head that gives one number per token: what critics and reward models share.

It is transformers' own sequence classification architecture with one label, so that transformers loads what is saved;
of vision-language models, for which it has none, `seeing_classifier`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlbench.errors import BuildError
from rlbench.nn import HuggingFaceFsdp2TrainModule
from rlbench.nn.lora import Adapted, plain_name
from rlbench.rewards.seeing_classifier import seeing_classifier
from rlbench.strategies.memory.offloading import HALF
from rlbench.strategies.sharding.materialize import full_shapes
from rlbench.strategies.sharding.sources import TensorSource, initialised, loaded_silently, open_source
from rlbench.trainers.models.policy_module import config_of, on_meta
from rlbench.trainers.passes.forward import taken_by

HEAD = "score"
OUTPUT_LAYERS = ("lm_head.", "embed_out.")
"""Of a language model's checkpoint: what a scalar model has no use for."""


class ScalarHeadModel(HuggingFaceFsdp2TrainModule):
    """`module(input_ids, …)` gives float32 numbers; mixed with an architecture of transformers by `make_scalar`.

    `checkpoint_head` is what the head is called in the checkpoint; `score` is understood too. `head_seed` is that of a
    head that the checkpoint lacks; None: that is refused. `in_half`: the last forward computed in half precision.
    """

    checkpoint_head: str = HEAD
    head_seed: int | None = None
    packing_proved: bool = False
    in_half: bool = False
    config: Any
    score: nn.Linear

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        positions: Tensor | None = None,
        **images: Tensor,
    ) -> Tensor:
        """Return the head's numbers (P,) float32, at `positions` (P,) of the flattened `input_ids`; None: at all.
        `images`: those of a model that sees, as `ImageReader` lays them out."""
        backbone = getattr(self, self.base_model_prefix)
        offered = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
        found = backbone(input_ids=input_ids, **taken_by(backbone.forward, offered), **images)
        states = found.last_hidden_state.flatten(0, 1)
        states = states if positions is None else states[positions]
        self.in_half = states.dtype in HALF or _autocasts(states)
        with _as_written(states):  # returns need more digits than half precision has
            return linear(states.float(), self.score.weight.float())[:, 0]

    def materialization_source(self) -> Any:
        """Return the backbone's weights from the checkpoint, one at a time; the head's from there or drawn."""
        path = super().materialization_source()
        source = open_source(path, full_shapes(self), self._source_revision, 0)
        head, found = self._sorted(source)
        if head is None and self.head_seed is None:
            raise BuildError(
                f"{path} holds no {self.checkpoint_head}.weight: give a reward model's checkpoint, the head's name "
                "there (value_head_prefix), or seed=… for a head drawn at random."
            )
        held = full_shapes(self)
        wanted = {plain_name(name) for name in held} - {f"{HEAD}.weight"} - Adapted.of(self).adapter_names()
        if wanted - found.keys() or found.keys() - held.keys():
            found = _through_transformers(source, self.base_model_prefix, (*OUTPUT_LAYERS, *([head] if head else [])))
        read_head = self._drawn_head if head is None else partial(source.read, head)
        return {name: read for name, read in found.items() if name != f"{HEAD}.weight"} | {f"{HEAD}.weight": read_head}

    def _sorted(self, source: TensorSource) -> tuple[str | None, dict[str, Callable[[], Tensor]]]:
        """Return the head's name in the source, and the rest by the module's own names."""
        heads = [name for name in (f"{self.checkpoint_head}.weight", f"{HEAD}.weight") if name in source.names]
        held, prefix = full_shapes(self), f"{self.base_model_prefix}."
        found: dict[str, Callable[[], Tensor]] = {}
        for name in source.names:
            if name not in heads and not name.startswith(OUTPUT_LAYERS):
                own = name if name in held or prefix + name not in held else prefix + name
                found[own] = partial(source.read, name)
        return (heads[0] if heads else None), found

    def _drawn_head(self) -> Tensor:
        """Draw from a normal of deviation 1 / (width + 1): values begin near 0, alike on any number of ranks."""
        shape = full_shapes(self)[f"{HEAD}.weight"]
        fill = partial(nn.init.normal_, mean=0.0, std=1.0 / (shape[-1] + 1))
        return initialised(f"{HEAD}.weight", fill, shape, self.head_seed or 0)


def _autocasts(states: Tensor) -> bool:
    """Whether operations on such a tensor are cast by themselves; on meta, where sizes alone are computed, none is."""
    return not states.is_meta and torch.is_autocast_enabled(states.device.type)


def _as_written(states: Tensor) -> AbstractContextManager[Any]:
    """Have operations on such a tensor computed in the dtype they are given; torch knows no autocast on meta."""
    return nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False)


def make_scalar(
    kind: type[ScalarHeadModel],
    path: str,
    dtype: str | torch.dtype | None,
    head: str,
    seed: int | None,
    revision: str | None,
) -> Any:
    """Make a module of `kind` on meta; `strategy.prepare_model` or `strategy.load_ckpt` gives it its weights."""
    from transformers import AutoModelForSequenceClassification

    config = config_of(path, revision)
    mapping = AutoModelForSequenceClassification._model_mapping
    architecture = mapping[type(config)] if type(config) in mapping else seeing_classifier(config)
    headless = BuildError(
        f"{path!r} is a {config.model_type!r} model, for which transformers has no scalar head over a causal model; "
        "write the module yourself (rlbench.nn), or take another checkpoint."
    )
    if architecture is None:
        raise headless
    cls: Any = type(f"{kind.__name__}{architecture.__name__}", (kind, architecture), {"__module__": __name__})
    module = on_meta(cls, path, dtype, num_labels=1, revision=revision)
    head_layer = getattr(module, HEAD, None)
    if not isinstance(head_layer, nn.Linear) or head_layer.bias is not None:
        raise headless
    module.checkpoint_head, module.head_seed = head, seed
    return module


def _through_transformers(source: TensorSource, prefix: str, apart: tuple[str, ...]) -> dict[str, Callable[[], Tensor]]:
    """Read a backbone with other names on disk by transformers, whole in host memory; `apart` is no part of it."""
    from transformers import AutoModel

    model, report = loaded_silently(AutoModel, source.label)
    missing = sorted(map(str, report["missing_keys"]))
    unknown = sorted(name for name in map(str, report["unexpected_keys"]) if not name.startswith(apart))
    if missing or unknown:
        raise BuildError(
            f"the weights of {source.label} do not fit {type(model).__name__}: missing {missing[:4]}, unknown "
            f"{unknown[:4]}. Give the right checkpoint; where a head is among the unknown, name it: value_head_prefix=…"
        )
    return {f"{prefix}.{name}": partial(_same, tensor) for name, tensor in model.state_dict().items()}


def _same(tensor: Tensor) -> Tensor:
    """Return the tensor: bound to one it is an initialiser without an argument, which nothing is filled for."""
    return tensor
