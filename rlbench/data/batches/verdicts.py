"""What pairs say of each head of a reward model: in which respect a response is better, worse, or as good."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlbench.errors import DataError, LossError, Suggesting, nearest

VERDICTS = {"chosen": 1.0, "A": 1.0, "rejected": -1.0, "B": -1.0, "tie": 0.0, "C": 0.0}
"""Words for a verdict, ours and LightRFT's, as numbers."""


@dataclass(frozen=True, eq=False)
class Verdicts(Suggesting):
    """Of B sequences, those of a pair alike.

    Attributes:
        heads: names, in the order of the columns.
        values: (B, heads) float32; 1: the chosen response is the better one, -1: the worse one, 0: both are rated
            equal, NaN: nothing is said of that head.
        weights: (heads,) float32; pairs of the whole step for each of them that says something of the head, 0 where
            none does. None: of a batch that is not in a step.
    """

    heads: tuple[str, ...]
    values: np.ndarray
    weights: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def of(cls, said: Sequence[Mapping[str, float]]) -> Verdicts:
        """Make those of pairs, two sequences for each; heads in the order in which they are first named."""
        heads = tuple(dict.fromkeys(name for one in said for name in one))
        values = np.array([[one.get(name, np.nan) for name in heads] for one in said], np.float32)
        return cls(heads, np.repeat(values.reshape(-1, len(heads)), 2, axis=0))

    def rows(self, indices: np.ndarray) -> Verdicts:
        """Return those of the given sequences."""
        return replace(self, values=self.values[indices])

    def of_heads(self, heads: Sequence[str]) -> Verdicts:
        """Return the same for a model with these heads, in its order. Raises LossError for a head that it lacks."""
        if unknown := [name for name in self.heads if name not in heads]:
            has = (
                f"it has {', '.join(heads)}" if heads else "it has one head without a name: rb.RewardModel(…, heads=…)"
            )
            raise LossError(
                f"the pairs judge {unknown[0]!r}, a head that the reward model lacks{nearest(unknown[0], heads)}; {has}"
            )
        unsaid = np.full(len(self), np.nan, np.float32)
        columns = [self.values[:, self.heads.index(name)] if name in self.heads else unsaid for name in heads]
        return replace(self, heads=tuple(heads), values=np.stack(columns, axis=1))

    def weighed(self) -> Verdicts:
        """Return them with `weights`, as those of a whole step; where they have them, as they are."""
        if self.weights is not None:
            return self
        counts = (~np.isnan(self.values)).sum(0)
        weights = np.where(counts > 0, len(self) / np.maximum(counts, 1), 0.0)
        return replace(self, weights=weights.astype(np.float32))

    def said(self, row: int) -> dict[str, float]:
        """Return what is said of each head for one sequence, by name."""
        return {name: float(v) for name, v in zip(self.heads, self.values[row], strict=True) if not np.isnan(v)}


def joined_verdicts(parts: Sequence[Verdicts | None], lengths: Sequence[int]) -> Verdicts | None:
    """Join those of several batches, of so many sequences each; of a head it does not name one says nothing."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if len(known) < sum(1 for count in lengths if count):
        raise DataError("join: only some of the batches judge heads, the others judge the whole score")
    heads = tuple(dict.fromkeys(name for part in known for name in part.heads))
    return Verdicts(heads, np.concatenate([part.of_heads(heads).values for part in known]))


def verdicts_of(given: Any) -> dict[str, float] | None:
    """Read what a row says of heads: {"quality": "chosen", "style": "tie"}, a mapping or one as JSON; None: nothing.

    A verdict is "chosen", "rejected" or "tie", LightRFT's "A", "B" or "C", or 1, -1 or 0; None says nothing of a head.
    """
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except ValueError as error:
            raise DataError(f"its heads are no JSON: {error}") from None
    if given is None or given == "":
        return None
    if not isinstance(given, Mapping):
        raise DataError(f"its heads are a {type(given).__name__}: wanted {{'quality': 'chosen', 'style': 'tie'}}")
    found = {str(name): _verdict(str(name), value) for name, value in given.items() if value is not None}
    if not found:
        raise DataError("its heads say nothing of any head: name one at least, or leave the column out in all rows")
    return found


def _verdict(name: str, value: Any) -> float:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, str) and value in VERDICTS:
        return VERDICTS[value]
    if not isinstance(value, bool) and isinstance(value, int | float) and value in (1, -1, 0):
        return float(value)
    hint = nearest(value, VERDICTS) if isinstance(value, str) else ""
    raise DataError(
        f"its heads say {value!r} of {name!r}{hint}: wanted 'chosen', 'rejected' or 'tie' (A, B, C), or 1, -1 or 0"
    )
