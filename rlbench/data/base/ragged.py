"""Rows of different lengths in one flat array: `values[offsets[i]:offsets[i + 1]]` is row i.

The one layout for everything per token. It crosses processes through shared memory without a copy, where nested
Python lists would be pickled element by element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlbench.errors import DataError


@dataclass(frozen=True, eq=False)
class Ragged:
    """`values` (total,) any dtype; `offsets` (rows + 1,) int64, starting at 0 and ending at total."""

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


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Row lengths (rows,) to offsets (rows + 1,)."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, np.int64))])


def flat_index(offsets: np.ndarray, rows: np.ndarray | Sequence[int]) -> np.ndarray:
    """Positions, in the flat array, of all elements of the given rows, in order."""
    chosen = np.asarray(rows, np.int64)
    lengths = np.diff(offsets)[chosen]
    starts = np.repeat(offsets[:-1][chosen] - offsets_of(lengths)[:-1], lengths)
    return starts + np.arange(int(lengths.sum()), dtype=np.int64)
