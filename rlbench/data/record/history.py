"""What was done in a session, oldest first: its steps as a list, a table and curves; its verbs as a table."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlbench.data.base.drawing import drawn, needed
from rlbench.errors import DataError, Suggesting, nearest
from rlbench.units import format_number, format_seconds

VERBS_SHOWN = 12


class Records(Suggesting, Sequence[dict[str, Any]]):
    """A list of records; a slice of it is of its own kind."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self.records[index]
        part = copy.copy(self)
        part.records = self.records[index]
        return part


class Verbs(Records):
    """The verbs of a session, oldest first; each a record.

    A record has `verb`; `args`: name -> how the argument reads; `hashes` of the code, arrays and batches among them;
    `where` it was called, a cell's or a file's line; `time`: Unix seconds; `seconds`; `outcome`: "done", "stopped",
    "failed" or "running", with what was `said`; `step` and `version` after it; `metrics`; `seed`, and of a rollout its
    `number` and the `digest` of its tokens.
    """

    def __init__(self, records: list[dict[str, Any]], source: Callable[[dict[str, Any]], str]) -> None:
        super().__init__(records)
        self._source = source

    def source(self, record: dict[str, Any]) -> str:
        """Return the code a verb used, as it was then: its cell, and the losses, rewards and helpers it was given."""
        return self._source(record)

    def to_pandas(self) -> Any:
        """A DataFrame with one row per verb; metrics get columns of their own (`metrics/loss`)."""
        plain = ("outcome", "said", "step", "version", "seconds", "time", "where")
        rows = [
            {"verb": one["verb"], "args": given_text(one["args"])}
            | {name: one[name] for name in plain}
            | {f"metrics/{name}": value for name, value in one["metrics"].items()}
            | {f"hash/{name}": value for name, value in one["hashes"].items()}
            for one in self.records
        ]
        return needed("pandas", "history.verbs.to_pandas()").DataFrame(rows)

    def __repr__(self) -> str:
        if not self.records:
            return "Verbs(none yet)"
        left = len(self.records) - VERBS_SHOWN
        head = [f"Verbs({len(self.records)})", *([f"  … {left} earlier"] if left > 0 else [])]
        return "\n".join([*head, *map(_line, self.records[-VERBS_SHOWN:])])


class History(Records):
    """The records of steps; `history["reward"]` is one metric over the steps, None where a step lacks it.

    `history[-1]` is the last record, `history[10:]` the history from the eleventh on. A value inside a part of a record
    is called by both names: `history["seconds/total"]`. Evaluations of a step's weights are in its record, as
    `eval/<set>/reward`; those of the weights before the first step are in `begin`.
    """

    def __init__(
        self,
        records: list[dict[str, Any]],
        read_verbs: Callable[[], Verbs] | None = None,
        lent: bool = False,
        begin: Mapping[str, float] | None = None,
    ) -> None:
        """`lent`: the records are another's, who must not see what a reader changes in one. `begin`: what was measured
        before the first step, by name."""
        super().__init__(records)
        self.begin = dict(begin or {})
        self._read_verbs = read_verbs
        self._lent, self._copied = lent, set[int]()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return self._metric(index)
        if isinstance(index, slice):
            part: History = super().__getitem__(index)
            part._copied = set()
            part.begin = self.begin if index.start in (None, 0) else {}
            return part
        if self._lent and (at := range(len(self.records))[index]) not in self._copied:
            self.records[at] = copy.deepcopy(self.records[at])  # one by one: most histories are read at their end
            self._copied.add(at)
        return super().__getitem__(index)

    @property
    def verbs(self) -> Verbs:
        """Every verb of the session, not the steps alone: arguments, sources, outcome, metrics, time."""
        if self._read_verbs is None:
            raise DataError("these step records did not come from a session: session.history.verbs has the verbs")
        return self._read_verbs()

    @property
    def names(self) -> list[str]:
        """The metrics that are numbers in some step: what `plot` can draw."""
        return list(dict.fromkeys(name for row in self._rows() for name, value in row.items() if is_number(value)))

    def values(self, name: str) -> np.ndarray:
        """One metric over the steps, (steps,) float64, NaN where a step lacks it."""
        metric = self._metric(name)
        if metric and not any(is_number(value) for value in metric):
            raise DataError(f"{name!r} is no number in any step{nearest(name, self.names)}; see history.names")
        return np.array([float(value) if is_number(value) else np.nan for value in metric])

    def to_pandas(self) -> Any:
        """A DataFrame with one row per step; the parts of a record get columns of their own (`seconds/total`)."""
        return needed("pandas", "history.to_pandas()").DataFrame(self._rows())

    def plot(
        self,
        *names: str,
        x: str = "step",
        compare: Mapping[str, History] | None = None,
        smooth: float | None = None,
        name: str | None = None,
    ) -> Any:
        """Metrics over the steps, one panel each; with other runs on the same axes. Returns a `Chart`.

        Args:
            names: of metrics (see `names`); default: reward, loss, KL, … and evaluations, as far as there are any.
            x: `"step"`, or what was spent until then: `"tokens"` trained on, `"seconds"` of training steps.
            compare: name -> history of another run, drawn beside this one: `{"lr 1e-5": other.history}`.
            smooth: draw an exponential moving average of this span (in steps, above 1) over the faint values.
            name: what this run is called beside the others; default: "this".
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
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and not math.isnan(value)


def given_text(args: Mapping[str, str]) -> str:
    """Arguments for a reader; those without a name are numbered in a record."""
    return ", ".join(value if name.isdigit() else f"{name}={value}" for name, value in args.items())


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _line(one: dict[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(one["time"]))
    went = "" if one["outcome"] == "done" else f"  {one['outcome']}: {one['said']}"
    metrics = "".join(f"  {name} {format_number(value)}" for name, value in one["metrics"].items() if name != "lr")
    return f"  {clock}  {one['verb']}({given_text(one['args'])})  {format_seconds(one['seconds'])}{metrics}{went}"
