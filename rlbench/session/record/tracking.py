"""Trackers of a run (TensorBoard, W&B, MLflow, trackio, …) through accelerate's tracking.

The x axis is the number of steps taken in the session so far, which never goes back: W&B and others drop what does. The
session's own step is a metric, `step`, that falls where a step is undone.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from rlbench.data import Rollouts
from rlbench.data.base.optional import needed
from rlbench.data.record.history import is_number
from rlbench.data.record.metric_names import with_aliases
from rlbench.data.record.metrics import Metrics
from rlbench.dispatch.link import Link
from rlbench.errors import SessionError, nearest
from rlbench.session.options import SessionOptions
from rlbench.session.record.recording import Entry
from rlbench.user_code import user_code

STEPS = ("train_step", "optim_step")


class Tracker(Protocol):
    """A tracker of accelerate's."""

    name: str
    tracker: Any

    def log(self, values: dict[str, Any], step: int | None = None) -> None: ...


class Trackers:
    """The trackers of a session in this kernel, by name.

    What they were made with is kept at the monitor, so that a kernel that attaches goes on with them.
    """

    def __init__(self, link: Link, options: SessionOptions, entries: Callable[[], list[Entry]]) -> None:
        self._link, self._options, self._entries = link, options, entries
        self._running: dict[str, Any] | None = None
        self._steps: int | None = None

    def __repr__(self) -> str:
        running = self._running if self._running is not None else [spec["tracker"] for spec in self._specs()]
        return f"Trackers({', '.join(running) or 'none: session.track(name)'})"

    def start(self, tracker: Any, run: str | None, folder: str, options: dict[str, Any]) -> Tracker:
        """Start one; returns accelerate's tracker, whose `.tracker` is the library's own run."""
        running = self._all()
        if isinstance(tracker, str):
            spec = {"tracker": tracker, "run": run or self._link.name, "folder": folder, "options": options}
            name, made = tracker, _made(spec)
        else:
            given = [key for key, value in (("run", run), ("options", options)) if value]
            if given:
                kind = type(tracker).__name__
                raise SessionError(f"track({kind}(…), {given[0]}=…): a tracker of your own has its own")
            spec, name, made = None, str(getattr(tracker, "name", type(tracker).__name__)), _checked(tracker)
        if name in running:
            raise SessionError(f"the session is tracked by {name} already: session.untrack({name!r}) ends that")
        made.start()
        made.store_init_configuration(flat(self._options.to_json()))
        running[name] = made
        if spec is not None:
            self._keep([*self._specs(), spec])
        return made

    def finish(self, name: str | None) -> list[str]:
        """End one, or all; returns their names."""
        running = self._all()
        if name is not None and name not in running:
            raise SessionError(f"the session is not tracked by {name!r}{nearest(name, running)}")
        ended = list(running) if name is None else [name]
        for one in ended:
            running.pop(one).finish()
        if not self._link.closed:
            self._keep([spec for spec in self._specs() if spec["tracker"] not in ended])
        return ended

    def log(self, entry: Entry, value: Any) -> None:
        """Log what a verb gave. A tracker that fails is said each time, and training goes on."""
        values = logged(entry, value)
        running = self._all() if values else {}
        if not running:
            return
        at = self._count(entry.verb in STEPS)
        for name, tracker in running.items():
            with _told(name, f"log {entry.verb}"):
                tracker.log(values, step=at)

    def iterated(self, values: Mapping[str, Any]) -> None:
        """Log an iteration of a trainer, by the names of a session's steps."""
        if not (running := self._all()):
            return
        at = self._count(True)
        for name, tracker in running.items():
            with _told(name, "log an iteration"):
                tracker.log(with_aliases(flat(values, numbers=True)), step=at)

    def close(self) -> None:
        """End what runs here; the session is over."""
        for name, tracker in (self._running or {}).items():
            with _told(name, "end"):
                tracker.finish()
        self._running = {}

    def _all(self) -> dict[str, Any]:
        """Those that run; in a kernel that attached, those that the session had are started again."""
        if self._running is None:
            self._running = {}
            for spec in self._specs():
                with _told(spec["tracker"], "go on in this kernel"):
                    made = _made(spec)
                    made.start()
                    self._running[spec["tracker"]] = made
        return self._running

    def _specs(self) -> list[dict[str, Any]]:
        return list(self._link.state("trackers")["trackers"])

    def _keep(self, specs: list[dict[str, Any]]) -> None:
        self._link.set(trackers=specs)

    def _count(self, stepped: bool) -> int:
        """Steps and iterations so far, this one included: those on record, and the steps of `optim_step`, which has no
        record."""
        if self._steps is None:
            entries = self._entries()
            alone = sum(one.verb == "optim_step" and one.outcome == "done" for one in entries)
            self._steps = alone + len(self._link.state("records")["records"])
        elif stepped:
            self._steps += 1
        return self._steps


@contextlib.contextmanager
def _told(name: str, what: str) -> Iterator[None]:
    """A tracker in trouble is told of: a service that is away must not end a step that is done, or keep a session."""
    try:
        with user_code():
            yield
    except Exception as error:  # whatever the tracker's library raises
        warnings.warn(f"tracker {name} could not {what}: {type(error).__name__}: {error}", stacklevel=5)


def logged(entry: Entry, value: Any) -> dict[str, float]:
    """The numbers of a verb that a tracker gets."""
    if entry.verb in STEPS and isinstance(value, Metrics):
        return with_aliases(flat(value, numbers=True))
    if entry.verb == "evaluate" and value is not None:
        return {"evaluation/reward": value.reward}
    if entry.verb == "rollout" and isinstance(value, Rollouts) and value.samples:
        seconds = value.stats.get("seconds")
        rate = {"rollout/tokens_per_s": value.stats["tokens"] / seconds} if seconds else {}
        shape = {"rollout/length": float(value.lengths.mean()), "rollout/truncated": float(value.truncated.mean())}
        return shape | rate
    return {}


def flat(values: Mapping[str, Any], prefix: str = "", numbers: bool = False) -> dict[str, Any]:
    """Nested values by one name each (`seconds/total`); `numbers`: those alone, else also text, None as text."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}/", numbers)
        elif is_number(value) or (not numbers and isinstance(value, bool)):
            found[f"{prefix}{name}"] = value if isinstance(value, bool | int) else float(value)
        elif not numbers:
            found[f"{prefix}{name}"] = str(value)
    return found


def _made(spec: Mapping[str, Any]) -> Any:
    tracking = needed("accelerate.tracking", "session.track()")
    _single_process()
    known = {str(kind): cls for kind, cls in tracking.LOGGER_TYPE_TO_CLASS.items()}
    kind = str(spec["tracker"])
    if kind not in known:
        raise SessionError(f"no tracker {kind!r}{nearest(kind, known)}; there are {', '.join(sorted(known))}")
    there = [str(one) for one in tracking.get_available_trackers()]
    if kind not in there:
        installed = f"installed here: {', '.join(there)}" if there else "none is installed here"
        raise SessionError(f"tracker {kind!r} needs its package: pip install {kind.replace('_', '-')} ({installed})")
    place = {"logging_dir": spec["folder"]} if known[kind].requires_logging_directory else {}
    return known[kind](spec["run"], **place, **spec["options"])


def _checked(tracker: Any) -> Any:
    tracking = needed("accelerate.tracking", "session.track()")
    _single_process()
    if not isinstance(tracker, tracking.GeneralTracker):
        raise SessionError(
            f"track takes a name or an accelerate.tracking.GeneralTracker of your own, got {type(tracker).__name__}"
        )
    return tracker


def _single_process() -> None:
    """accelerate's trackers ask whether this is the main process: a kernel is, and it must not take a GPU for that."""
    needed("accelerate", "session.track()").PartialState(cpu=True)
