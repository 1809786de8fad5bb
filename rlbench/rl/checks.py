"""One wording for what the mathematics refuses: the argument, what was seen, what is wanted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlbench.errors import LossError, nearest


def rewards(rewards: Tensor, group: Tensor | None = None) -> None:
    """Refuse rewards that are not (B,), empty or not finite, and group numbers that do not match them."""
    if rewards.dim() != 1 or rewards.numel() == 0:
        empty = "the batch is empty: " if rewards.numel() == 0 else ""
        raise LossError(f"{empty}rewards has shape {tuple(rewards.shape)}; wanted (B,), one reward per response.")
    if group is not None:
        shape("group", group, tuple(rewards.shape))
        if group.is_floating_point() or group.dtype == torch.bool:
            raise LossError(f"group has dtype {group.dtype}; wanted integers, one number per prompt.")
    finite("rewards", rewards)


def mask(mask: Tensor, rows: int | None = None) -> None:
    """Refuse a mask that is not bool (B, T), an empty one, and one of another batch."""
    if mask.dim() != 2 or mask.dtype != torch.bool or (rows is not None and len(mask) != rows):
        wanted = f"bool ({'B' if rows is None else rows}, T), True for trained tokens"
        raise LossError(f"mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; wanted {wanted}.")
    if mask.numel() == 0:
        raise LossError(f"the batch is empty: mask has shape {tuple(mask.shape)}.")


def shape(name: str, value: Tensor, wanted: tuple[int, ...]) -> None:
    """Refuse another shape than the one wanted."""
    if tuple(value.shape) != wanted:
        raise LossError(f"{name} has shape {tuple(value.shape)}; wanted {wanted}.")


def logits(name: str, logits: Tensor, tokens: Tensor) -> None:
    """Refuse logits that are not (S, T, V) beside `tokens` (S, T)."""
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise LossError(f"{name} has shape {tuple(logits.shape)}; wanted {(*tokens.shape, 'V')}.")


def finite(name: str, values: Tensor) -> None:
    """Refuse NaN and infinities; the message names the first rows."""
    bad = torch.atleast_1d(~torch.isfinite(values))
    if bad.any():
        rows = sorted(set(bad.nonzero()[:, 0].tolist()))
        raise LossError(f"{name}: {int(bad.sum())} values are not finite, first at rows {rows[:5]}; mend their source.")


def choice(owner: str, field: str, value: object, known: Iterable[str]) -> None:
    """Refuse a name that is none of `known`; the message lists the near ones."""
    names = list(known)
    if value not in names:
        near = nearest(str(value), names)
        raise LossError(f"{owner}: {field}={value!r} is unknown{near}. Use one of: {', '.join(names)}.")


def number(
    owner: str, field: str, value: float, low: float, high: float = math.inf, above: bool = False, whole: bool = False
) -> None:
    """Refuse what is no number in [low, high], NaN too; with `above`, also `low` itself; with `whole`, no integer."""
    try:
        inside = (low < value if above else low <= value) and value <= high
    except TypeError:
        inside = False
    if inside and whole and not isinstance(value, int):
        raise LossError(f"{owner}: {field}={value!r} must be a whole number.")
    if not inside:
        wanted = f"lie in {'(' if above else '['}{low:g}, {high:g}]"
        if high == math.inf:
            wanted = "be a number" if low == -math.inf else f"be {'>' if above else '>='} {low:g}"
        raise LossError(f"{owner}: {field}={value!r} must {wanted}.")


class Checked:
    """Base of frozen dataclasses that hold their fields' rules (`within`, `one_of`), also with other defaults."""

    def __post_init__(self) -> None:
        kinds = [kind for kind in reversed(type(self).__mro__) if is_dataclass(kind)]
        rules = {f.name: f for kind in kinds for f in fields(kind) if "check" in f.metadata}
        for name, rule in rules.items():
            value = getattr(self, name)
            if value is not None or rule.default is not None:
                rule.metadata["check"](type(self).__name__, name, value)


def within(default: float | None, low: float, high: float = math.inf, above: bool = False, whole: bool = False) -> Any:
    """Declare a field of a `Checked` dataclass that takes numbers as `number` does."""
    return field(default=default, metadata={"check": partial(number, low=low, high=high, above=above, whole=whole)})


def one_of(default: str, known: Iterable[str]) -> Any:
    """Declare a field of a `Checked` dataclass that takes one of `known`."""
    return field(default=default, metadata={"check": partial(choice, known=tuple(known))})


def counts(name: str, values: Tensor, wanted: tuple[int, ...]) -> None:
    """Refuse counts of another shape than the one wanted, and negative ones."""
    shape(name, values, wanted)
    if bool((values < 0).any()):
        raise LossError(f"{name} holds {values.min():g}; wanted counts of at least 0.")


def clean_tokens(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return (B, T) values as float64, zero outside the mask; refuse another shape and non-finite trained ones."""
    shape(name, values, tuple(mask.shape))
    clean = torch.where(mask, values.double(), 0.0)
    finite(name, clean)
    return clean


def wide_rows(**named: Tensor) -> list[Tensor]:
    """Return (B,) arguments in one dtype, float32 or wider; refuse other shapes and an empty batch."""
    name, first = next(iter(named.items()))
    if first.dim() != 1 or first.numel() == 0:
        raise LossError(f"{name} has shape {tuple(first.shape)}; wanted (B,), one number per sequence, B >= 1.")
    for name, value in named.items():
        shape(name, value, tuple(first.shape))
    wide = torch.float64 if any(value.dtype == torch.float64 for value in named.values()) else torch.float32
    return [value.to(wide) for value in named.values()]


def output_dtype(rewards: Tensor) -> torch.dtype:
    """Return the dtype of a result: that of the rewards, but never narrower than float32."""
    return torch.float64 if rewards.dtype == torch.float64 else torch.float32


def placed(values: Tensor, mask: Tensor) -> Tensor:
    """Return (S, T) with `values` at the True entries of `mask`, in their order, and 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
