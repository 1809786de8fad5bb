"""A scalar head that reads another layer than the last, or pools a sequence by attention, or several; and classifiers
with such.

transformers has no such classifier: rlbench loads what is saved. Its weights are called otherwise than those of a plain
head, so that transformers finds none for its own head instead of computing other scores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from rlbench.errors import BuildError, nearest
from rlbench.rewards.head_names import head_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

SHAPED = "shaped_score"
"""What such a head is called in a module and a checkpoint; a plain one is `score`."""
IN_CONFIG = "scalar_head"
LAST, ATTENTION = "last", "attention"
POOLINGS = (LAST, ATTENTION)
ATTENTION_HEADS = 4
LAST_LAYER = -1


@dataclass(frozen=True)
class HeadShape:
    """What a head reads: the state of one token ("last"), or all up to it pooled ("attention"), of `probing_layer`.

    Layers are counted as transformers' `hidden_states`: 0 is the embedding, k the output of layer k, and the last, -1,
    has gone through the model's final norm. `heads`: names of several heads, each of which reads so by itself, with
    their weights in the score; none: one without a name.
    """

    pooling: str = LAST
    probing_layer: int = LAST_LAYER
    heads: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        layer = self.probing_layer
        if self.heads:
            object.__setattr__(self, "heads", head_weights(self.heads))
        if self.pooling not in POOLINGS:
            hint = nearest(str(self.pooling), POOLINGS)
            raise BuildError(f"pooling={self.pooling!r} is none{hint}; use {' or '.join(map(repr, POOLINGS))}.")
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise BuildError(f"probing_layer={layer!r} is no layer: give a whole number, -1 for the last.")

    @property
    def plain(self) -> bool:
        """Whether it is the head of transformers' sequence classifiers."""
        return self == HeadShape()

    @classmethod
    def of(cls, config: Any) -> HeadShape:
        """Return the shape that a checkpoint's config names; of one that names none the plain one."""
        found: Mapping[str, Any] | None = getattr(config, IN_CONFIG, None)
        return cls() if found is None else cls(**found)

    def check(self, config: Any) -> None:
        """Raise BuildError where the model of a config has no such layer, or a width that cannot be pooled."""
        text = config.get_text_config()
        layers, width = int(text.num_hidden_layers), int(text.hidden_size)
        if not -layers - 1 <= self.probing_layer <= layers:
            raise BuildError(
                f"probing_layer={self.probing_layer}: the model has {layers} layers. Give 0 (the embedding) to "
                f"{layers}, or -1 (the last) to {-layers - 1}."
            )
        if self.pooling == ATTENTION and width % ATTENTION_HEADS:
            raise BuildError(
                f"pooling='attention' has {ATTENTION_HEADS} heads, which do not divide the model's width of {width}; "
                "take pooling='last'."
            )

    def put(self, config: Any) -> None:
        """Write it into the config of a model that it is checked for."""
        self.check(config)
        if not self.plain:
            named = {"heads": dict(self.heads)} if self.heads else {}
            setattr(config, IN_CONFIG, {"pooling": self.pooling, "probing_layer": self.probing_layer, **named})

    def states_of(self, found: Any) -> Tensor:
        """Return the layer's states (B, T, width), of what a backbone gave."""
        if self.probing_layer == LAST_LAYER:
            return found.last_hidden_state  # type: ignore[no-any-return]
        return found.hidden_states[self.probing_layer]  # type: ignore[no-any-return]

    @property
    def backbone_options(self) -> dict[str, bool]:
        """What the backbone is asked for besides."""
        return {} if self.probing_layer == LAST_LAYER else {"output_hidden_states": True}

    def made(self, width: int, outputs: int) -> ShapedHead | ShapedHeads:
        """Return the head over states of that width; several have an output each."""
        return ShapedHeads(width, self) if self.heads else ShapedHead(width, outputs, self)


class ShapedHead(nn.Module):
    """A linear head over the states (…, width) of `shape`; everything is computed in float32.

    Attention pooling (Lee et al., arXiv 1810.00825, with one learned query): of token t it is softmax(q·K s_i / √d) V
    s_i over the tokens i ≤ t of its sequence, in four heads of d each.
    """

    query: nn.Parameter
    key: nn.Linear
    value: nn.Linear

    def __init__(self, width: int, outputs: int, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(outputs, width))
        if shape.pooling == ATTENTION:
            self.query = nn.Parameter(torch.empty(width))
            self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(2))

    def scores(self, states: Tensor, starts: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return the scores (P, outputs) float32 after the tokens at `positions` (P,) of the flattened states, None: at
        all; `states` and `starts` as of `read`."""
        read = self.read(states, starts)
        return self(read if positions is None else read[positions])  # type: ignore[no-any-return]

    def read(self, states: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return what the head reads after each token, (B T, width), of states (B, T, width).

        `starts` (T,) bool: where sequences begin that are packed into one row; None: rows padded behind.
        """
        if self.shape.pooling == LAST:
            return states.flatten(0, 1)
        if starts is None or states.is_meta:
            return self.pooled(states).flatten(0, 1)
        lengths = _lengths(starts)
        longest = max(lengths)
        rows = [pad(row, (0, 0, 0, longest - len(row))) for row in states[0].split(lengths)]
        return torch.cat([row[:n] for row, n in zip(self.pooled(torch.stack(rows)), lengths, strict=True)])

    def pooled(self, states: Tensor) -> Tensor:
        """Pool the tokens up to each one, (S, T, width) float32."""
        states = states.float()
        keys, values = (_in_heads(linear(states, part.weight.float())) for part in (self.key, self.value))
        query = self.query.float().view(1, ATTENTION_HEADS, 1, -1).expand_as(keys)
        return scaled_dot_product_attention(query, keys, values, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, read: Tensor) -> Tensor:
        """Return the scores (…, outputs) float32 of what was read (…, width)."""
        return linear(read.float(), self.weight.float())


class ShapedHeads(nn.Module):
    """Several heads by the names of `shape`, each a `ShapedHead` of one output called `NAME_head`."""

    def __init__(self, width: int, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        for name in shape.heads:
            self.add_module(f"{name}_head", ShapedHead(width, 1, shape))

    def scores(self, states: Tensor, starts: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return the score of each head, (P, heads) float32; see `ShapedHead.scores`."""
        each = (self.get_submodule(f"{name}_head") for name in self.shape.heads)
        return torch.cat([head.scores(states, starts, positions) for head in each], dim=1)  # type: ignore[operator]


def _lengths(starts: Tensor) -> list[int]:
    ends = [*starts.nonzero()[:, 0].tolist(), len(starts)]
    return [end - start for start, end in pairwise(ends)]


def _in_heads(states: Tensor) -> Tensor:
    """Split (S, T, width) into (S, heads, T, width / heads)."""
    return states.unflatten(2, (ATTENTION_HEADS, -1)).transpose(1, 2)


def shaped_classifier(architecture: Any) -> type[Any]:
    """Return a sequence classifier over the same backbone with the head that its config names, as `shaped_score`."""
    return _shaped(architecture)


@lru_cache(maxsize=8)
def _shaped(architecture: Any) -> type[Any]:

    class ShapedClassifier(architecture):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            del self.score
            shape = HeadShape.of(config)
            self.shaped_score = shape.made(config.get_text_config().hidden_size, config.num_labels)

    ShapedClassifier.__name__ = ShapedClassifier.__qualname__ = architecture.__name__
    ShapedClassifier.__module__ = architecture.__module__
    return ShapedClassifier


@torch.no_grad()
def scores_at_the_ends(model: Any, ids: Tensor, mask: Tensor, **more: Tensor) -> Tensor:
    """Return what a sequence classifier over a causal backbone says at each row's last token, (B, outputs) float32.

    Args:
        model: in this process, whole.
        ids, mask: (B, T) int64, padded behind.
        more: what else its backbone takes.
    """
    head: ShapedHead | ShapedHeads | None = getattr(model, SHAPED, None)
    asked = {} if head is None else head.shape.backbone_options
    found = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False, **asked, **more)
    last = torch.arange(len(ids), device=ids.device) * ids.shape[1] + mask.sum(1) - 1
    if head is None:
        return linear(found.last_hidden_state.flatten(0, 1)[last].float(), model.score.weight.float())
    return head.scores(head.shape.states_of(found), positions=last)
