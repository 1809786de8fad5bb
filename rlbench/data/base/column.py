"""One number per completion that knows its name: an array in every computation, with a summary and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlbench.data.base.drawing import drawn
from rlbench.units import format_number

PERCENTILES = (10, 50, 90)


class Column(np.ndarray):
    """An array with a name and a unit, as `rollouts.lengths` and `rollouts.rewards` are.

    A slice, a mask or a sorted copy is still such a column; what is computed from one (`lengths > 5`) is a plain array.
    `truncated`: which of the numbers were cut by the length limit, where that is known and the column is whole.
    """

    name: str
    unit: str
    truncated: np.ndarray | None

    @classmethod
    def of(cls, values: Any, name: str, unit: str = "", truncated: np.ndarray | None = None) -> Column:
        """A column over `values` (N,), without a copy where they are an array."""
        column = np.asarray(values).view(cls)
        column.name, column.unit, column.truncated = name, unit, truncated
        return column

    def __array_finalize__(self, source: Any) -> None:
        self.name, self.unit = getattr(source, "name", ""), getattr(source, "unit", "")
        self.truncated = None  # other rows, or another order

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        """Compute on plain arrays: the result is no longer what this column is called."""
        if out is not None:
            options["out"] = tuple(_plain(value) for value in out)
        result = getattr(ufunc, method)(
            *map(_plain, inputs), **{name: _plain(value) for name, value in options.items()}
        )
        return out[0] if out is not None and len(out) == 1 and isinstance(out[0], Column) else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Column.of, (np.asarray(self), self.name, self.unit, self.truncated)

    def __repr__(self) -> str:
        head = f"{self.name}: {self.described()}\n" if self.ndim == 1 and self.name else ""
        return f"{head}{np.asarray(self)!r}"

    def summary(self) -> dict[str, float]:
        """`count`, `mean`, `std`, `min`, `p10`, `p50`, `p90`, `max`; of lengths also `truncated`, a share of 1.

        Of no values it has the count alone. NaN is no value: a reward whose scoring failed is one.
        """
        values = np.asarray(self, np.float64).ravel()
        values = values[~np.isnan(values)]
        if not len(values):
            return {"count": 0}
        low, *between, high = np.percentile(values, [0, *PERCENTILES, 100])
        numbers = {"count": len(values), "mean": float(values.mean()), "std": float(values.std()), "min": float(low)}
        numbers |= {f"p{p}": float(v) for p, v in zip(PERCENTILES, between, strict=True)} | {"max": float(high)}
        return numbers if self.truncated is None else numbers | {"truncated": float(self.truncated.mean())}

    def described(self) -> str:
        """The summary in one line, for a reader."""
        numbers = self.summary()
        count, truncated = int(numbers.pop("count")), numbers.pop("truncated", None)
        if not count:
            return "no values yet"
        shown = [f"{name} {format_number(value)}" for name, value in numbers.items()]
        cut = [] if truncated is None else [f"{format_number(100 * truncated)} % truncated"]
        return " · ".join([f"{format_number(count)} values{f', {self.unit}' if self.unit else ''}", *shown, *cut])

    def plot(self, compare: Mapping[str, Any] | None = None, bins: int | None = None, name: str | None = None) -> Any:
        """The distribution as a histogram, a `Chart`; with others on the same axis, each as shares of its own total.

        Args:
            compare: name -> other numbers of the same kind, as `{"step 1": earlier.lengths}`.
            bins: number of bins, the same for all; default: by their spread, one per whole number where those are few.
            name: what these are called beside the others; default: the column's name.
        """
        return drawn("column_plot", self, compare=compare, bins=bins, name=name)


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, Column) else value
