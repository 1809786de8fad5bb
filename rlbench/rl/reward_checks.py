"""What everything that turns rewards into advantages refuses, in one wording: argument, shape seen, shape wanted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlbench.errors import LossError, nearest

MEANING = {
    "mask": "a bool tensor (B, T), True for trained tokens",
    "lengths": "integers (B,), the trained tokens of each response",
    "truncated": "a bool tensor (B,), True for responses cut at the length limit",
    "components": "{name: rewards (B,)}, one entry per kind of reward",
    "token_rewards": "rewards (B, T) placed on tokens",
    "values": "the critic's values (B, T), each of the state before its token",
    "logprobs": "log-probabilities (B, T) of the sampled tokens under the policy",
    "ref_logprobs": "log-probabilities (B, T) under the reference policy",
    "teacher_logprobs": "log-probabilities (B, T) under the teacher",
    "baseline_rewards": "rewards (B,) of the greedy response to each response's prompt",
    "turns": "integers (B, T), the turn (or step) that each token belongs to",
}
"""The arguments an advantage estimator may ask for by name, as an error message describes them."""


def check_rewards(rewards: Tensor, group: Tensor | None = None) -> None:
    """Refuse rewards that are not (B,), empty or not finite, and group numbers that do not match them."""
    if rewards.dim() != 1:
        raise LossError(f"rewards has shape {tuple(rewards.shape)}; wanted (B,), one reward per response.")
    if rewards.numel() == 0:
        raise LossError("the batch is empty: rewards has shape (0,); wanted at least one response.")
    if group is not None:
        check_shape("group", group, tuple(rewards.shape))
        if group.is_floating_point() or group.dtype == torch.bool:
            raise LossError(f"group has dtype {group.dtype}; wanted integers, one number per prompt.")
    check_finite("rewards", rewards)


def check_mask(mask: Tensor, rows: int | None = None) -> None:
    """Refuse a mask that is not bool (B, T), an empty one, and one of another batch."""
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise LossError(f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; wanted {MEANING['mask']}.")
    if rows is not None and len(mask) != rows:
        raise LossError(f"mask has shape {tuple(mask.shape)}; wanted ({rows}, T), one row per response.")
    if mask.numel() == 0:
        raise LossError(f"the batch is empty: mask has shape {tuple(mask.shape)}.")


def check_shape(name: str, value: Tensor, wanted: tuple[int, ...]) -> None:
    """Refuse another shape than the one wanted."""
    if tuple(value.shape) != wanted:
        raise LossError(f"{name} has shape {tuple(value.shape)}; wanted {wanted}.")


def check_finite(name: str, values: Tensor) -> None:
    """Refuse NaN and infinities; the message names the first rows."""
    bad = torch.atleast_1d(~torch.isfinite(values))
    if bad.any():
        rows = sorted(set(bad.nonzero()[:, 0].tolist()))
        raise LossError(
            f"{name}: {int(bad.sum())} values are not finite, first at rows {rows[:5]}. "
            "Mend where they come from (a reward function: score again)."
        )


def check_choice(owner: str, field: str, value: object, known: Iterable[str]) -> None:
    """Refuse a name that is none of `known`; the message lists the near ones."""
    names = list(known)
    if value not in names:
        raise LossError(
            f"{owner}: {field}={value!r} is unknown{nearest(str(value), names)}. Use one of: {', '.join(names)}."
        )


def check_number(owner: str, field: str, value: float, low: float, high: float = math.inf, above: bool = False) -> None:
    """Refuse what is no number in [low, high], NaN too; with `above`, also `low` itself."""
    try:
        inside = (low < value if above else low <= value) and value <= high
    except TypeError:
        inside = False
    if not inside:
        wanted = f"lie in {'(' if above else '['}{low:g}, {high:g}]"
        if high == math.inf:
            wanted = "be a number" if low == -math.inf else f"be {'>' if above else '>='} {low:g}"
        raise LossError(f"{owner}: {field}={value!r} must {wanted}.")


class Checked:
    """Base of frozen dataclasses that refuse what the rules of their fields (`within`, `one_of`) do not allow.

    A field keeps its rule where a subclass gives it another default; None passes where it is the rule's default.
    """

    def __post_init__(self) -> None:
        kinds = [kind for kind in reversed(type(self).__mro__) if is_dataclass(kind)]
        rules = {f.name: f for kind in kinds for f in fields(kind) if "check" in f.metadata}
        for name, rule in rules.items():
            value = getattr(self, name)
            if value is not None or rule.default is not None:
                rule.metadata["check"](type(self).__name__, name, value)


def within(default: float | None, low: float, high: float = math.inf, above: bool = False) -> Any:
    """Declare a field of a `Checked` dataclass that takes numbers as `check_number` does."""
    return field(default=default, metadata={"check": partial(check_number, low=low, high=high, above=above)})


def one_of(default: str, known: Iterable[str]) -> Any:
    """Declare a field of a `Checked` dataclass that takes one of `known`."""
    return field(default=default, metadata={"check": partial(check_choice, known=tuple(known))})


def needed(owner: object, name: str, value: Tensor | None) -> Tensor:
    """Return `value`; refuse None, saying what to pass."""
    if value is None:
        raise LossError(f"{type(owner).__name__} needs {name}: pass {name}={MEANING[name]}.")
    return value


def clean_tokens(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return (B, T) values as float64, zero outside the mask; refuse another shape and non-finite ones.

    Outside the mask anything may stand, NaN too.
    """
    check_shape(name, values, tuple(mask.shape))
    clean = torch.where(mask, values.double(), 0.0)
    check_finite(name, clean)
    return clean


def needed_tokens(owner: object, name: str, value: Tensor | None, mask: Tensor) -> Tensor:
    """Return `clean_tokens` of an argument; refuse None, saying what to pass."""
    return clean_tokens(name, needed(owner, name, value), mask)


def wide_rows(**named: Tensor) -> list[Tensor]:
    """Return (B,) arguments in one dtype, float32 or wider; refuse other shapes and an empty batch."""
    name, first = next(iter(named.items()))
    if first.dim() != 1 or first.numel() == 0:
        raise LossError(f"{name} has shape {tuple(first.shape)}; wanted (B,), one number per sequence, B >= 1.")
    for name, value in named.items():
        check_shape(name, value, tuple(first.shape))
    wide = torch.float64 if any(value.dtype == torch.float64 for value in named.values()) else torch.float32
    return [value.to(wide) for value in named.values()]


def output_dtype(rewards: Tensor) -> torch.dtype:
    """Return the dtype of a result: that of the rewards, but never narrower than float32."""
    return torch.float64 if rewards.dtype == torch.float64 else torch.float32
