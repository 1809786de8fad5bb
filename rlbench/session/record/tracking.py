"""Trackers of a run (TensorBoard, W&B, MLflow, trackio, …) through accelerate's tracking.

The x axis is the number of steps taken in the session so far, which never goes back: W&B and others drop what does. The
session's own step is a metric, `step`, that falls where a step is undone.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from rlbench.data import Rollouts, TrainBatch
from rlbench.data.base.drawing import needed
from rlbench.data.record.history import is_number
from rlbench.data.record.metric_names import with_aliases
from rlbench.data.record.metrics import Metrics
from rlbench.dispatch.link import Link
from rlbench.errors import SessionError, nearest
from rlbench.session.options import SessionOptions
from rlbench.session.record.recording import Entry
from rlbench.session.record.samples import Decode, SampleTable, sender
from rlbench.user_code import user_code

STEPS = ("train_step", "optim_step")
SAMPLES_EVERY = 10
"""Steps from one table of samples to the next; the first step that is tracked has one."""


class Tracker(Protocol):
    """A tracker of accelerate's."""

    name: str
    tracker: Any

    def log(self, values: dict[str, Any], step: int | None = None) -> None: ...


@dataclass
class Turn:
    """When a tracker gets samples: of a step once `every` so many are over, of an evaluation each time; 0: never."""

    every: int
    next: int = 0

    @classmethod
    def of(cls, every: int | None) -> Turn:
        """From what a user gave; None is the default."""
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 0):
            raise SessionError(f"samples_every={every!r}: wanted a number of steps; 0 sends no samples")
        return cls(SAMPLES_EVERY if every is None else every)

    def comes(self, at: int, stepped: bool) -> bool:
        """Whether it is its turn at step `at`; the next one of a step is so many later."""
        if not (self.due(at) if stepped else self.every):
            return False
        if stepped:
            self.next = at + self.every
        return True

    def due(self, at: int) -> bool:
        """Whether it is the turn of a step."""
        return bool(self.every) and at >= self.next


class Trackers:
    """The trackers of a session in this kernel, by name.

    What they were made with is kept at the monitor, so that a kernel that attaches goes on with them.
    """

    def __init__(self, link: Link, options: SessionOptions, entries: Callable[[], list[Entry]], decode: Decode) -> None:
        self._link, self._options, self._entries, self._decode = link, options, entries, decode
        self._running: dict[str, Any] | None = None
        self._steps: int | None = None
        self._turns: dict[str, Turn] = {}
        self._trained: TrainBatch | None = None

    def start(
        self, tracker: Any, run: str | None, folder: str, samples_every: int | None, options: dict[str, Any]
    ) -> Tracker:
        """Start one; returns accelerate's tracker, whose `.tracker` is the library's own run."""
        turn = Turn.of(samples_every)
        running, specs = self._all(), self._specs()
        if isinstance(tracker, str):
            spec: dict[str, Any] = {"tracker": tracker, "run": run or self._link.name, "folder": folder}
            spec |= {"options": options, "samples_every": samples_every}
            name, made = tracker, _made(spec)
            specs.append(spec)
        else:
            name, made = str(getattr(tracker, "name", type(tracker).__name__)), tracker
            if not isinstance(tracker, _tracking().GeneralTracker) or run or options:
                raise SessionError(
                    "track takes a name, or an accelerate.tracking.GeneralTracker of your own without run= and options"
                    f", got {type(tracker).__name__}"
                )
        if name in running:
            raise SessionError(f"the session is tracked by {name} already: session.untrack({name!r}) ends that")
        if samples_every and sender(made) is None:
            raise SessionError(
                f"samples_every={samples_every}: {name} has no tables; leave it out, and it gets numbers"
            )
        made.start()
        made.store_init_configuration(flat(self._options.to_json()))
        running[name], self._turns[name] = made, turn
        self._link.set(trackers=specs)
        return cast("Tracker", made)

    def finish(self, name: str | None) -> list[str]:
        """End one, or all; returns their names."""
        running = self._all()
        if name is not None and name not in running:
            raise SessionError(f"the session is not tracked by {name!r}{nearest(name, running)}")
        ended = list(running) if name is None else [name]
        for one in ended:
            running.pop(one).finish()
        if not self._link.closed:
            self._link.set(trackers=[spec for spec in self._specs() if spec["tracker"] not in ended])
        return ended

    def training_on(self, batch: TrainBatch) -> None:
        """Note the batch of the step that is under way: samples of it go along with its numbers."""
        self._trained = batch

    def log(self, entry: Entry, value: Any) -> None:
        """Log what a verb gave. A tracker that fails is said each time, and training goes on."""
        values = _logged(entry, value)
        self._log(values, entry.verb in STEPS, entry.verb)
        if entry.verb in STEPS:
            batch, self._trained = self._trained, None
            if isinstance(value, Metrics):
                self.trained(batch)
        elif entry.verb == "evaluate" and values:
            named = value.samples()
            self._send(lambda: [SampleTable.of_rollouts(*one) for one in named.items()], stepped=False)

    def log_values(self, values: Mapping[str, Any]) -> None:
        """Log a user's own numbers, at the step that was last."""
        self._log(dict(values), False, "log")

    def iterated(self, values: Mapping[str, Any]) -> None:
        """Log an iteration of a trainer, by the names of a session's steps."""
        self._log(with_aliases(flat(values, numbers=True)), True, "an iteration")

    @property
    def samples_due(self) -> bool:
        """Whether a tracker is to get samples of the step that was logged last."""
        running = self._all()
        at = self._count(False) if running else 0
        return any(self._turns[name].due(at) and sender(tracker) is not None for name, tracker in running.items())

    def trained(self, batch: TrainBatch | None) -> None:
        """Send samples of what a step was trained on, where it is their turn."""
        if batch is not None:
            self._send(lambda: [SampleTable.of_batch(batch, self._decode)], stepped=True)

    def close(self) -> None:
        """End what runs here; the session is over."""
        for name, tracker in (self._running or {}).items():
            with _warned(name, "end"):
                tracker.finish()
        self._running = {}

    def _log(self, values: dict[str, float], stepped: bool, what: str) -> None:
        running = self._all() if values else {}
        at = self._count(stepped) if running else 0
        for name, tracker in running.items():
            with _warned(name, f"log {what}"):
                tracker.log(values, step=at)

    def _send(self, make: Callable[[], list[SampleTable]], stepped: bool) -> None:
        """Send tables to the trackers that have some; those of a step where it is their turn."""
        running = self._all()
        at = self._count(False) if running else 0
        for name, tracker in running.items():
            with _warned(name, "log samples"):
                send = sender(tracker) if self._turns[name].comes(at, stepped) else None
                if send is not None:
                    for samples in make():
                        send(samples, at)

    def _all(self) -> dict[str, Any]:
        """Return those that run; in a kernel that attached, those that the session had are started again."""
        if self._running is None:
            self._running = {}
            for spec in self._specs():
                with _warned(spec["tracker"], "go on in this kernel"):
                    made = _made(spec)
                    made.start()
                    self._running[spec["tracker"]] = made
                    self._turns[spec["tracker"]] = Turn.of(spec.get("samples_every"))
        return self._running

    def _specs(self) -> list[dict[str, Any]]:
        return list(self._link.state("trackers")["trackers"])

    def _count(self, stepped: bool) -> int:
        """Count steps and iterations, this one included: those on record, and those of `optim_step`, which has none."""
        if self._steps is None:
            alone = sum(one.verb == "optim_step" and one.outcome == "done" for one in self._entries())
            self._steps = alone + len(self._link.steps(0)[1])
        elif stepped:
            self._steps += 1
        return self._steps


@contextlib.contextmanager
def _warned(name: str, what: str) -> Iterator[None]:
    """Warn of a tracker in trouble: a service that is away must not end a step that is done, or keep a session."""
    try:
        with user_code():
            yield
    except Exception as error:  # whatever the tracker's library raises
        warnings.warn(f"tracker {name} could not {what}: {type(error).__name__}: {error}", stacklevel=5)


def _logged(entry: Entry, value: Any) -> dict[str, float]:
    """Return the numbers of a verb that a tracker gets."""
    if entry.verb in STEPS and isinstance(value, Metrics):
        return with_aliases(flat(value, numbers=True))
    if entry.verb == "evaluate" and value is not None:
        return dict(value.metrics())
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
    tracking, kind = _tracking(), str(spec["tracker"])
    known = {str(one): cls for one, cls in tracking.LOGGER_TYPE_TO_CLASS.items()}
    if kind not in known:
        raise SessionError(f"no tracker {kind!r}{nearest(kind, known)}; there are {', '.join(sorted(known))}")
    there = [str(one) for one in tracking.get_available_trackers()]
    if kind not in there:
        installed = f"installed here: {', '.join(there) or 'none'}"
        raise SessionError(f"tracker {kind!r} needs its package: pip install {kind.replace('_', '-')} ({installed})")
    place = {"logging_dir": spec["folder"]} if known[kind].requires_logging_directory else {}
    return known[kind](spec["run"], **place, **spec["options"])


def _tracking() -> Any:
    """Return accelerate's trackers; they ask whether this is the main process: a kernel is, and takes no GPU for it."""
    tracking = needed("accelerate.tracking", "session.track()")
    needed("accelerate", "session.track()").PartialState(cpu=True)
    return tracking
