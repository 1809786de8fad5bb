"""Rows of different lengths in one flat array: the one layout for everything per token.

It crosses processes through shared memory without a copy, where nested lists would be pickled element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlbench.errors import DataError


@dataclass(frozen=True, eq=False)
class Ragged:
    """Row i is `values[offsets[i]:offsets[i + 1]]`: `values` (total,) any dtype, `offsets` (rows + 1,) int64 from 0."""

    values: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        ends = self.offsets
        if ends.ndim != 1 or len(ends) == 0 or ends[0] != 0 or ends[-1] != len(self.values):
            raise DataError(f"offsets {ends[:3]}… do not cover {len(self.values)} values")

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[float] | np.ndarray], dtype: np.dtype | type) -> Ragged:
        """Join rows (any sequences of numbers) into one flat array of `dtype`."""
        arrays = [np.asarray(row, dtype=dtype).reshape(-1) for row in rows]
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
        return cls(values, offsets_of([len(a) for a in arrays]))

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """One after another; at least one."""
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate([part.values for part in parts]), offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row, (rows,) int64."""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray | Sequence[int]) -> Ragged:
        """The given rows, in the given order."""
        return Ragged(self.values[flat_index(self.offsets, rows)], offsets_of(self.lengths[np.asarray(rows, int)]))

    def pick(self, flat: np.ndarray | None, rows: np.ndarray | Sequence[int]) -> Any:
        """Return numbers that lie beside the values for the given rows alone; None stays None."""
        return None if flat is None else flat[flat_index(self.offsets, rows)]

    def with_values(self, values: np.ndarray) -> Ragged:
        """The same rows with other values, one per old value."""
        return Ragged(values, self.offsets)

    def flat(self, name: str, values: Any) -> np.ndarray:
        """Numbers beside the values, given flat or one row per row, as one flat array; `name` says which, in errors."""
        if hasattr(values, "detach"):
            values = values.detach().cpu().float().numpy()
        try:
            if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind not in "biuf":
                values = list(values)
                if values and np.ndim(values[0]):
                    rows = Ragged.from_rows(values, np.float32)
                    if not np.array_equal(rows.offsets, self.offsets):
                        raise DataError(f"{name}: its rows are not as long as the completions")
                    return rows.values
                values = np.asarray(values, np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(f"{name}: wanted numbers, one per response token: {error}") from None
        if values.shape != self.values.shape:
            raise DataError(f"{name} has shape {values.shape}; wanted {self.values.shape}, one per response token")
        return values

    def padded(self) -> np.ndarray:
        """The rows as (rows, longest), zeros behind each."""
        lengths = self.lengths
        table = np.zeros((len(self), lengths.max(initial=0)), self.values.dtype)
        table[np.arange(table.shape[1]) < lengths[:, None]] = self.values
        return table


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Row lengths (rows,) to offsets (rows + 1,)."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, np.int64))])


def flat_index(offsets: np.ndarray, rows: np.ndarray | Sequence[int]) -> np.ndarray:
    """Positions, in the flat array, of all elements of the given rows, in order."""
    chosen = np.asarray(rows, np.int64)
    lengths = np.diff(offsets)[chosen]
    starts = np.repeat(offsets[:-1][chosen] - offsets_of(lengths)[:-1], lengths)
    return starts + np.arange(int(lengths.sum()), dtype=np.int64)


def rows_in_order(parts: list[dict[str, Any]]) -> dict[str, Ragged]:
    """Join the ranks' ragged `channels` in the batch's order, each row once; by name."""
    parts = [part for part in parts if len(part["rows"])]
    rows = np.concatenate([part["rows"] for part in parts]).astype(np.int64)
    _, first = np.unique(rows, return_index=True)  # a row that was repeated to fill a rank counts once
    shared = [name for name in parts[0]["channels"] if all(name in part["channels"] for part in parts)]
    return {name: Ragged.joined([part["channels"][name] for part in parts]).take(first) for name in shared}


def chosen_rows(keep: Any, count: int, items: Callable[[], Iterable[Any]]) -> np.ndarray:
    """Return the numbers of those of `count` rows that `keep` says: (count,) booleans, a function of an item (`items`
    gives them), or numbers."""
    if callable(keep):
        return np.flatnonzero([bool(keep(item)) for item in items()])
    chosen = np.asarray(keep, None if len(keep) else np.int64)
    fits = chosen.shape == (count,) if chosen.dtype == bool else chosen.ndim == 1 and chosen.dtype.kind in "iu"
    if not fits:
        raise DataError(
            f"select: wanted {count} booleans, a function of one, or numbers of rows; got {chosen.dtype} of shape "
            f"{chosen.shape}"
        )
    return np.arange(count)[chosen]
