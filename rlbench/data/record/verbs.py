"""The verbs of a session as a table: what was called, with what, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from rlbench.data.base.optional import needed
from rlbench.errors import Suggesting
from rlbench.units import format_number, format_seconds

SHOWN = 12


class Verbs(Suggesting, Sequence[dict[str, Any]]):
    """The verbs of a session, oldest first; each a record.

    A record has `verb`; `args`: name -> how the argument reads; `hashes` of the code, arrays and batches among them;
    `where` it was called, a cell's or a file's line; `time`: Unix seconds; `seconds`; `outcome`: "done", "stopped",
    "failed" or "running", with what was `said`; `step` and `version` after it; `metrics`; `seed`, and of a rollout its
    `number` and the `digest` of its tokens.
    """

    def __init__(self, records: list[dict[str, Any]], source: Callable[[dict[str, Any]], str]) -> None:
        self.records = list(records)
        self._source = source

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Verbs: ...

    def __getitem__(self, index: int | slice) -> Any:
        return Verbs(self.records[index], self._source) if isinstance(index, slice) else self.records[index]

    def source(self, record: dict[str, Any]) -> str:
        """Return the code a verb used, as it was then: its cell, and the losses, rewards and helpers it was given."""
        return self._source(record)

    def to_pandas(self) -> Any:
        """A DataFrame with one row per verb; metrics get columns of their own (`metrics/loss`).

        Raises:
            DataError: pandas is not installed.
        """
        rows = [
            {
                "verb": one["verb"],
                "args": _given(one),
                "outcome": one["outcome"],
                "said": one["said"],
                "step": one["step"],
                "version": one["version"],
                "seconds": one["seconds"],
                "time": one["time"],
                "where": one["where"],
                **{f"metrics/{name}": value for name, value in one["metrics"].items()},
                **{f"hash/{name}": value for name, value in one["hashes"].items()},
            }
            for one in self.records
        ]
        return needed("pandas", "history.verbs.to_pandas()").DataFrame(rows)

    def __repr__(self) -> str:
        if not self.records:
            return "Verbs(none yet)"
        shown = self.records[-SHOWN:]
        left = len(self.records) - len(shown)
        head = [f"Verbs({len(self.records)})", *([f"  … {left} earlier"] if left else [])]
        return "\n".join([*head, *map(_line, shown)])


def _line(one: dict[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(one["time"]))
    went = "" if one["outcome"] == "done" else f"  {one['outcome']}: {one['said']}"
    metrics = "".join(f"  {name} {format_number(value)}" for name, value in one["metrics"].items() if name != "lr")
    return f"  {clock}  {one['verb']}({_given(one)})  {format_seconds(one['seconds'])}{metrics}{went}"


def _given(one: dict[str, Any]) -> str:
    return given_text(one["args"])


def given_text(args: dict[str, str]) -> str:
    """Arguments for a reader; those without a name are numbered in a record."""
    return ", ".join(value if name.isdigit() else f"{name}={value}" for name, value in args.items())
