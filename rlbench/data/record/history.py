"""The records of a session's steps, oldest first: a list, a table, curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from rlbench.data.base.drawing import drawn
from rlbench.data.base.optional import needed
from rlbench.data.record.verbs import Verbs
from rlbench.errors import DataError, Suggesting, nearest
from rlbench.units import format_number


class History(Suggesting, Sequence[dict[str, Any]]):
    """A list of step records; `history["reward"]` is one metric over the steps, None where a step lacks it.

    `history[-1]` is the last record, `history[10:]` the history from the eleventh on. A value inside a part of a record
    is called by both names: `history["seconds/total"]`.
    """

    def __init__(self, records: list[dict[str, Any]], read_verbs: Callable[[], Verbs] | None = None) -> None:
        self.records = list(records)
        self._read_verbs = read_verbs

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, index: str) -> list[Any]: ...  # type: ignore[overload-overlap]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self._metric(index)
        if isinstance(index, slice):
            return History(self.records[index], self._read_verbs)
        return self.records[index]

    @property
    def verbs(self) -> Verbs:
        """Every verb of the session, not the steps alone: arguments, sources, outcome, metrics, time.

        Raises:
            DataError: these records did not come from a session.
        """
        if self._read_verbs is None:
            raise DataError("these step records did not come from a session: session.history.verbs has the verbs")
        return self._read_verbs()

    @property
    def names(self) -> list[str]:
        """The metrics that are numbers in some step: what `plot` can draw."""
        return list(dict.fromkeys(name for row in self._rows() for name, value in row.items() if is_number(value)))

    def values(self, name: str) -> np.ndarray:
        """One metric over the steps, (steps,) float64, NaN where a step lacks it.

        Raises:
            DataError: no step has it, or it is not a number.
        """
        found = self._metric(name)
        if found and not any(is_number(value) for value in found):
            raise DataError(f"{name!r} is no number in any step{nearest(name, self.names)}; see history.names")
        return np.array([float(value) if is_number(value) else np.nan for value in found])

    def to_pandas(self) -> Any:
        """A DataFrame with one row per step; the parts of a record get columns of their own (`seconds/total`).

        Raises:
            DataError: pandas is not installed.
        """
        return needed("pandas", "history.to_pandas()").DataFrame(self._rows())

    def table(self) -> Any:
        """The same as `to_pandas()`."""
        return self.to_pandas()

    def plot(
        self,
        *names: str,
        x: str = "step",
        compare: Mapping[str, History] | None = None,
        smooth: float | None = None,
        name: str | None = None,
    ) -> Any:
        """Metrics over the steps, one panel each; with other runs on the same axes.

        Args:
            names: of metrics (see `names`); default: reward, loss, KL, … as far as there are any.
            x: `"step"`, or what was spent until then: `"tokens"` trained on, `"seconds"` of training steps.
            compare: name -> history of another run, drawn beside this one: `{"lr 1e-5": other.history}`.
            smooth: draw an exponential moving average of this span (in steps, above 1) over the faint values.
            name: what this run is called beside the others; default: "this".

        Returns:
            A `Chart`: interactive in JupyterLab, a drawing where a notebook is only read, text in a terminal.

        Raises:
            DataError: no run has a metric, or a value that cannot be used.
        """
        return drawn("history_plot", self, names, x=x, compare=compare, smooth=smooth, name=name)

    def __repr__(self) -> str:
        if not self.records:
            return "History(no steps yet)"
        last = self.records[-1]
        shown = ", ".join(f"{k} {format_number(last[k])}" for k in ("reward", "loss", "kl") if last.get(k) is not None)
        return f"History({len(self.records)} steps; last: {shown})"

    def _rows(self) -> list[dict[str, Any]]:
        return [dict(_flat(record)) for record in self.records]

    def _metric(self, name: str) -> list[Any]:
        rows = [record if name in record else dict(_flat(record)) for record in self.records]
        if rows and not any(name in row for row in rows):
            known = dict.fromkeys(k for row in self._rows() for k in row)
            raise DataError(f"no step has a metric {name!r}{nearest(name, known)}; there are {', '.join(known)}")
        return [row.get(name) for row in rows]


def is_number(value: Any) -> bool:
    """Whether it is a finite or infinite number; a truth value or a NaN is none."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return number and not math.isnan(value)


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
