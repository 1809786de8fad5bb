"""What runs in a session: calls on workers, the driver's verb around them, and how far the calls are.

A call is known by its id and its epoch: one that was refused and sent again is the later one, in whatever order the
messages about them arrive.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rlbench.monitor.marks import Marks, kind_of, ran_out

NO_OUTPUT = 1 << 60
"""A cursor behind all that a call may print: only its progress is asked for."""


@dataclass
class RunningCall:
    """A call that was submitted to an engine and has not ended on its first worker."""

    what: str
    engine: str
    epoch: int
    since: float = field(default_factory=time.time)


class Running:
    """The calls and verbs under way, and the marks they leave. Not locked: the monitor holds its lock."""

    def __init__(self) -> None:
        self.marks = Marks()
        self.calls: dict[str, RunningCall] = {}
        self.verbs: dict[str, RunningCall] = {}
        self.stopped_verbs: set[str] = set()
        """Verbs that were asked to stop: what they will still call is stopped as it begins."""
        self._ended: collections.deque[tuple[str, int]] = collections.deque(maxlen=64)
        self._ended_verbs: collections.deque[str] = collections.deque(maxlen=64)

    def begin(self, call_id: str, call: RunningCall) -> None:
        """A call was submitted; a short call's end may have overtaken this."""
        over = (call_id, call.epoch) in self._ended
        if not over:
            self.calls[call_id] = call
        if self._part_of_a_verb(call):
            return
        if over:
            self.marks.instant(kind_of(call.what), call.what, call.engine)
        else:
            self.marks.begin(call_id, call.what, call.engine)

    def end(self, call_id: str, epoch: int, error: dict[str, str] | None = None) -> RunningCall | None:
        """The call of that epoch is over, with the failure it had; returns it, where it was known to run."""
        self._ended.append((call_id, epoch))
        known = self.calls.get(call_id)
        if known is None or known.epoch > epoch:
            return None
        self.marks.end(call_id)
        if error is not None and ran_out(error["kind"], error["message"]):
            self.marks.instant("oom", f"{known.what}: {error['kind']}", known.engine)
        return self.calls.pop(call_id)

    def begin_verb(self, verb_id: str, verb: RunningCall) -> None:
        """A driver began a verb of several calls; its messages may have overtaken this."""
        if verb_id in self._ended_verbs:
            self.marks.instant(kind_of(verb.what), verb.what)
            return
        self.verbs[verb_id] = verb
        own = [i for i, call in self.calls.items() if self._part_of_a_verb(call)]  # they overtook it
        self.marks.begin(verb_id, verb.what, instead_of=own)

    def end_verb(self, verb_id: str) -> None:
        """The verb is over."""
        self._ended_verbs.append(verb_id)
        self.marks.end(verb_id)
        self.verbs.pop(verb_id, None)
        self.stopped_verbs.discard(verb_id)

    def forget_verbs(self, epochs: Iterable[int] | None = None) -> None:
        """Nobody is left to end the verbs (of these epochs)."""
        chosen = None if epochs is None else set(epochs)
        for verb_id in [i for i, verb in self.verbs.items() if chosen is None or verb.epoch in chosen]:
            self.marks.end(verb_id)
            del self.verbs[verb_id]
            self.stopped_verbs.discard(verb_id)

    def _part_of_a_verb(self, call: RunningCall) -> bool:
        """Whether a verb that runs says the same already: its mark covers the call's."""
        return any(kind_of(v.what) == kind_of(call.what) and v.epoch == call.epoch for v in self.verbs.values())

    def names(self) -> list[str]:
        """What runs, each once, for a sentence."""
        return list(dict.fromkeys(call.what for call in (*self.verbs.values(), *self.calls.values())))


class ProgressPoll:
    """How far the running calls are, as the workers report it: asked without waiting, read at the next look."""

    def __init__(self) -> None:
        self._asked: dict[str, list[Any]] = {}
        self._known: dict[str, list[dict[str, Any]]] = {}

    def look(self, calls: dict[str, list[Any]]) -> None:
        """Read what was asked for at the last look, and ask the actors of each call anew."""
        for call_id, refs in self._asked.items():
            if values := [dict(told.values) for told in answers(refs, 0) if told.values]:
                self._known[call_id] = values
        self._known = {call_id: values for call_id, values in self._known.items() if call_id in calls}
        self._asked = {
            call_id: [actor.poll.remote(call_id, NO_OUTPUT) for actor in actors]
            for call_id, actors in calls.items()
            if actors
        }

    def of(self, call_id: str) -> list[dict[str, Any]]:
        """One object per worker that told something."""
        return self._known.get(call_id, [])


def answers(refs: list[Any], within_s: float) -> list[Any]:
    """What workers answered in time; a dead one says nothing."""
    import ray

    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=within_s) if refs else ([], [])
    said = []
    for ref in ready:
        with contextlib.suppress(ray.exceptions.RayError):
            said.append(ray.get(ref))
    return said
