"""What evaluations found, each bound to the weights it is of: at the monitor as numbers, in this kernel whole.

An evaluation belongs to the step record whose weights it is of. Where the session goes back (`undo`, `restore`,
`branch`), records leave its course, and so do the evaluations of them: they stay listed, as undone.
"""

from __future__ import annotations

import secrets
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rlbench.data import Rollouts
from rlbench.data.base.drawing import needed
from rlbench.data.record.history import Records
from rlbench.dispatch.link import Link
from rlbench.errors import DataError, nearest
from rlbench.monitor.state import BEGIN, measured_at, with_measured
from rlbench.session.record.step_records import StepRecords
from rlbench.units import format_number

KEPT_BYTES = 1 << 29
"""Of evaluations with their rollouts, kept in this kernel; the oldest are let go, their numbers stay."""
SAVED_BYTES = 1 << 26
"""Of the completions that a checkpoint takes along: those of the newest evaluations."""
FILE = "evaluation-{}.parquet"
"""Of a checkpoint: the completions of the evaluation with this id."""
GONE = -2
"""In a checkpoint, the record of an evaluation whose step record is not in its history."""
SHOWN = 12


class Found(Protocol):
    """What an evaluation says of itself."""

    @property
    def name(self) -> str: ...
    @property
    def reward(self) -> float: ...
    @property
    def rollouts(self) -> Rollouts: ...
    @property
    def version(self) -> int | None: ...
    @property
    def interval(self) -> tuple[float, float]: ...
    @property
    def items(self) -> Sequence[Any]: ...
    def metrics(self) -> dict[str, float]: ...


class PastEvaluations(Records):
    """The evaluations of a session, oldest first; each a record, `["gsm8k"]` are those of one set.

    A record has `set`, `step`, `version`, `adapter`, `reward` with its 95 % interval `low` to `high`, `prompts`,
    `completions`, `metrics`, `time`, and `state`: "now" of the weights that the session has, "earlier" of those that
    led to them, "undone" of those it went back behind, "on idea" of those of another branch, "apart" where the weights
    are not on its record (another adapter, several versions at once).
    """

    def __init__(self, records: list[dict[str, Any]], kept: dict[str, Any]) -> None:
        super().__init__(records)
        self._kept = kept

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, str):
            return super().__getitem__(index)
        names = dict.fromkeys(record["set"] for record in self.records)
        if index not in names:
            there = ", ".join(map(repr, names)) or "none"
            raise DataError(f"no set {index!r} was evaluated{nearest(index, names)}; there are {there}")
        return PastEvaluations([one for one in self.records if one["set"] == index], self._kept)

    def at(self, version: int, name: str | None = None) -> Any:
        """Return the last evaluation of weights `version`, of the set `name` where there are several: its rollouts and
        items, and `compare` with a later one. DataError where there is none, or its kernel is gone."""
        chosen = self if name is None else self[name]
        found = [one for one in chosen.records if one["version"] == version]
        names = dict.fromkeys(one["set"] for one in found)
        if not found:
            versions = ", ".join(dict.fromkeys(f"v{one['version']}" for one in chosen.records)) or "none"
            raise DataError(f"no evaluation of v{version}; there are those of {versions}")
        if len(names) > 1:
            raise DataError(f"v{version} was evaluated on several sets: at({version}, name), of {', '.join(names)}")
        if found[-1]["id"] not in self._kept:
            raise DataError(
                f"the completions of this evaluation of v{version} are not in this kernel any more (another one made "
                "them, or later ones took the room): its numbers are session.evaluations[…]"
            )
        return self._kept[found[-1]["id"]]

    def to_pandas(self) -> Any:
        """A DataFrame with one row per evaluation; metrics get columns of their own."""
        rows = [{k: v for k, v in one.items() if k != "metrics"} | one["metrics"] for one in self.records]
        return needed("pandas", "session.evaluations.to_pandas()").DataFrame(rows)

    def __repr__(self) -> str:
        left = len(self) - SHOWN
        lines = [f"  … {left} earlier"] if left > 0 else []
        for one in self.records[-SHOWN:]:
            version = "several versions" if one["version"] is None else f"v{one['version']}"
            named = (one["set"], f"step {one['step']}", version, f"reward {format_number(one['reward'])}", one["state"])
            lines.append("  " + "  ".join(filter(None, named)))
        count = f"{len(self)} evaluation{'' if len(self) == 1 else 's'}"
        return "\n".join([count, *lines]) if lines else "no evaluations yet: session.evaluate(…)"


class EvaluationLog:
    """The evaluations of a session; those made in this kernel whole, as far as `KEPT_BYTES` reach.

    `made_again`: an evaluation of its completions and the name of its set; given by what makes them.
    """

    made_again: ClassVar[Callable[[Rollouts, str], Found]]

    def __init__(self, link: Link, steps: StepRecords) -> None:
        self._link, self._steps = link, steps
        self._kept: dict[str, Any] = {}

    def note(self, found: Sequence[Found], adapter: str | None = None) -> None:
        """Put evaluations on record; `adapter`: of other weights than the session's own."""
        entries = [self._entry(one, adapter) for one in found]
        self._link.apply({"do": "evaluated", "entries": entries})
        self._kept |= {entry["id"]: one for entry, one in zip(entries, found, strict=True)}
        sizes = [_nbytes(one) for one in self._kept.values()]
        while len(sizes) > 1 and sum(sizes) > KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
            del sizes[0]

    def read(self, folder: Path, entries: Sequence[Mapping[str, Any]]) -> None:
        """Hold the evaluations of these entries, which are on record, whose completions a checkpoint has."""
        files = {str(one["id"]): (folder / FILE.format(one["id"]), str(one["set"])) for one in entries}
        there = {id_: (file, name) for id_, (file, name) in files.items() if file.is_file()}
        made_again = type(self).made_again
        self._kept |= {id_: made_again(Rollouts.from_parquet(file), name) for id_, (file, name) in there.items()}

    def saved(self) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        """Return what a checkpoint keeps: the entries, with the step records of its history numbered in order, and as
        files the completions of the newest."""
        places = {BEGIN: BEGIN, **{number: place for place, number in enumerate(self._steps.course())}}
        entries = list(self._link.state("evaluations")["evaluations"])
        files: dict[str, bytes] = {}
        room = SAVED_BYTES
        for id_, one in reversed(self._kept.items()):
            room -= _nbytes(one)
            if room < 0:
                break
            try:
                files[FILE.format(id_)] = _as_parquet(one.rollouts)
            except DataError as error:
                said = f"the completions of evaluation {one.name!r} are not in the checkpoint, its numbers are: {error}"
                warnings.warn(said, stacklevel=2)
        return [one | {"at": None if one["at"] is None else places.get(one["at"], GONE)} for one in entries], files

    def listed(self) -> PastEvaluations:
        """Return all of them as the session stands now."""
        state = self._link.state("evaluations", "version", "step", "branches", "branch", "snapshots")
        course = self._steps.course()
        branches = {
            number: name
            for name, end in state["branches"].items()
            if name != state["branch"]
            for number in self._steps.course_to(state["snapshots"][end]["tip"])
        }
        records = [one | {"state": _state(one, course, state, branches)} for one in state["evaluations"]]
        return PastEvaluations([{k: v for k, v in one.items() if k != "at"} for one in records], dict(self._kept))

    def in_history(self) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Return the step records that led to where the session stands, with what was measured of the weights of each,
        and what was measured before the first step."""
        course, records = self._steps.followed()
        measured = measured_at(self._link.state("evaluations", "logged"))
        if measured:
            joined = zip(course, records, strict=True)
            records = [with_measured(record, measured.get(at)) for at, record in joined]
        return records, measured.get(BEGIN, {})

    def _entry(self, found: Found, adapter: str | None) -> dict[str, Any]:
        state = self._link.state("version", "step", "tip")
        at, step = self._place(found.version, state) if adapter is None else (None, int(state["step"]))
        low, high = found.interval
        return {
            "id": secrets.token_hex(6),
            "set": found.name,
            "adapter": adapter,
            "version": found.version,
            "step": step,
            "at": at,
            "reward": found.reward,
            "low": low,
            "high": high,
            "prompts": len(found.items),
            "completions": sum(len(item.rows) for item in found.items),
            "metrics": found.metrics(),
            "time": time.time(),
        }

    def _place(self, version: int | None, state: dict[str, Any]) -> tuple[int | None, int]:
        """Return the number and the step of the record whose weights are of this version, as replicas may be behind."""
        if version == state["version"]:
            return BEGIN if state["tip"] is None else int(state["tip"]), int(state["step"])
        for number, record in self._backwards():
            if record.get("version") == version:
                return number, int(record["step"])
        return (BEGIN, 0) if version == 0 else (None, int(state["step"]))

    def _backwards(self) -> Iterator[tuple[int, dict[str, Any]]]:
        course, records = self._steps.followed()
        return zip(reversed(course), reversed(records), strict=True)


def _nbytes(one: Found) -> int:
    return int(one.rollouts.responses.values.nbytes + one.rollouts.logprobs.nbytes)


def _as_parquet(rollouts: Rollouts) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return rollouts.to_parquet(Path(folder) / "rollouts.parquet").read_bytes()


def _state(one: dict[str, Any], course: Sequence[int], state: dict[str, Any], branches: Mapping[int, str]) -> str:
    """Say how the weights of an evaluation stand to those that the session has now; `branches`: of other records."""
    if one["at"] is None:
        return "apart"
    if one["at"] not in (BEGIN, *course) or one["step"] > state["step"]:
        return f"on {branches[one['at']]}" if one["at"] in branches else "undone"
    tip = course[-1] if course else BEGIN
    same = one["version"] == state["version"] or (one["at"] == tip and one["step"] == state["step"])
    return "now" if same else "earlier"
