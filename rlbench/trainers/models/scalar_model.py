"""A checkpoint's backbone under a head that gives one number per token: what critics and reward models share.

It is transformers' own sequence classification architecture with one label, so that transformers loads what is saved;
of vision-language models, for which it has none, `media_classifier`. A head that reads otherwise is a `ShapedHead`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlbench.errors import BuildError
from rlbench.nn import HuggingFaceFsdp2TrainModule
from rlbench.nn.lora import Adapted, plain_name
from rlbench.rewards.media_classifier import media_classifier
from rlbench.rewards.shaped_head import SHAPED, HeadShape, ShapedHead, ShapedHeads, shaped_classifier
from rlbench.strategies.memory.offloading import HALF
from rlbench.strategies.sharding.materialize import full_shapes
from rlbench.strategies.sharding.sources import TensorSource, initialised, loaded_silently, open_source
from rlbench.trainers.models.policy_module import config_of, on_meta
from rlbench.trainers.passes.forward import taken_by

HEAD = "score"
OUTPUT_LAYERS = ("lm_head.", "embed_out.", "language_model.lm_head.")
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
        """Return the head's numbers (P,) float32, at `positions` (P,) of the flattened `input_ids`; None: at all. Of
        several heads (P, heads). `images`: those of a model that sees, as `ImageReader` lays them out."""
        backbone, head = getattr(self, self.base_model_prefix), shaped_head(self)
        offered = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
        more = {} if head is None else head.shape.backbone_options
        found = backbone(input_ids=input_ids, **taken_by(backbone.forward, offered), **more, **images)
        states = found.last_hidden_state if head is None else head.shape.states_of(found)
        self.in_half = states.dtype in HALF or _autocasts(states)
        with _as_written(states):  # returns need more digits than half precision has
            if head is not None:
                numbers = head.scores(states, _starts(attention_mask, position_ids), positions)
                return numbers if head.shape.heads else numbers[:, 0]
            read = states.flatten(0, 1)
            read = read if positions is None else read[positions]
            return linear(read.float(), self.score.weight.float())[:, 0]

    def materialization_source(self) -> Any:
        """Return the backbone's weights from the checkpoint, one at a time; the head's from there or drawn."""
        path = super().materialization_source()
        source = open_source(path, full_shapes(self), self._source_revision, 0)
        head, found = self._sorted(source)
        held = full_shapes(self)
        own = {name for name in held if name.startswith(f"{self.head_name}.")}
        if not head and self.head_seed is None:
            raise BuildError(
                f"{path} holds no {self.checkpoint_head}.weight: give a reward model's checkpoint, the head's name "
                "there (value_head_prefix), or seed=… for a head drawn at random."
            )
        wanted = {plain_name(name) for name in held} - own - Adapted.of(self).adapter_names()
        if wanted - found.keys() or found.keys() - held.keys():
            found = _through_transformers(source, self.base_model_prefix, (*OUTPUT_LAYERS, *head.values()))
        read_head = {n: partial(source.read, head[n]) if n in head else partial(self._drawn, n) for n in own}
        return {name: read for name, read in found.items() if name not in own} | read_head

    def _sorted(self, source: TensorSource) -> tuple[dict[str, str], dict[str, Callable[[], Tensor]]]:
        """Return the names of the head's parameters in the source by the module's own, and the rest by those."""
        held, prefix = full_shapes(self), f"{self.base_model_prefix}."
        heads = [name for name in (f"{self.checkpoint_head}.weight", f"{HEAD}.weight") if name in source.names]
        head = {f"{HEAD}.weight": heads[0]} if heads and self.head_name == HEAD else {}
        if self.head_name == SHAPED:
            head = {name: name for name in source.names if name.startswith(f"{SHAPED}.")}
        found: dict[str, Callable[[], Tensor]] = {}
        for name in source.names:
            if name not in heads and name not in head and not name.startswith(OUTPUT_LAYERS):
                own = name if name in held or prefix + name not in held else prefix + name
                found[own] = partial(source.read, name)
        return head, found

    @property
    def head_name(self) -> str:
        """What the head is called in the module."""
        return HEAD if shaped_head(self) is None else SHAPED

    def _drawn(self, name: str) -> Tensor:
        """Draw a parameter of the head, alike on any number of ranks.

        Its own weight is of deviation 1 / (width + 1): values begin near 0. Of attention pooling the query is of 0.02,
        keys and values are as torch draws linear layers.
        """
        shape = full_shapes(self)[name]
        fill: Callable[[Tensor], Any] = partial(nn.init.normal_, mean=0.0, std=1.0 / (shape[-1] + 1))
        if name.endswith(".query"):
            fill = partial(nn.init.normal_, mean=0.0, std=0.02)
        elif name.endswith((".key.weight", ".value.weight")):
            fill = partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
        return initialised(name, fill, shape, self.head_seed or 0)


def shaped_head(module: nn.Module) -> ShapedHead | ShapedHeads | None:
    """Return the head of a module that has one which is not plain."""
    head = getattr(module, SHAPED, None)
    return head if isinstance(head, ShapedHead | ShapedHeads) else None


def heads_of(module: nn.Module) -> Mapping[str, float]:
    """Return the names of several heads and their weights in the score; of one head nothing."""
    head = shaped_head(module)
    return {} if head is None else head.shape.heads


def in_all(module: nn.Module, scores: Tensor) -> Tensor:
    """Return the score (N,) of what a module gave: of several heads (N, heads) their weighted sum."""
    return scores if scores.dim() == 1 else scores @ scores.new_tensor(list(heads_of(module).values()))


def _starts(attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor | None:
    """Where sequences begin that are packed into one row, (T,) bool: at position 0, in each of its dimensions; None of
    padded rows."""
    if attention_mask is not None or position_ids is None:
        return None
    return (position_ids == 0).reshape(-1, position_ids.shape[-1]).all(0)


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
    shape: HeadShape | None = None,
) -> Any:
    """Make a module of `kind` on meta; `strategy.prepare_model` or `strategy.load_ckpt` gives it its weights.

    `shape`: of its head; None: what the checkpoint names.
    """
    from transformers import AutoModelForSequenceClassification

    config = config_of(path, revision)
    mapping = AutoModelForSequenceClassification._model_mapping
    architecture = mapping[type(config)] if type(config) in mapping else media_classifier(config)
    headless = BuildError(
        f"{path!r} is a {config.model_type!r} model, for which transformers has no scalar head over a causal model; "
        "write the module yourself (rlbench.nn), or take another checkpoint."
    )
    if architecture is None:
        raise headless
    shape = HeadShape.of(config) if shape is None else shape
    shape.put(config)
    config.num_labels = 1
    architecture = architecture if shape.plain else shaped_classifier(architecture)
    cls: Any = type(f"{kind.__name__}{architecture.__name__}", (kind, architecture), {"__module__": __name__})
    module = on_meta(cls, path, dtype, config=config, revision=revision)
    head_layer = getattr(module, HEAD, None)
    if shape.plain and (not isinstance(head_layer, nn.Linear) or head_layer.bias is not None):
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
