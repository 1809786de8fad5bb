"""One sampler per session, a thread of the kernel for all its views: it asks the monitor and tells them."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlbench.errors import SessionError
from rlbench.monitor import client
from rlbench.runtime import registry

BUSY_INTERVAL_S, IDLE_INTERVAL_S = 0.5, 1.0
"""The monitor samples twice a second; nobody needs to be asked more often than that."""
SAMPLES_KEPT, MARKS_KEPT, HISTORY_ASKED = 1200, 300, 100
OVERLAP_S = 0.001

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frame:
    """What is known of a session at one moment.

    `state`: the last answer of `GET /state`, with the last step records in `history`. `samples`, `marks`: all that are
    kept, oldest first. `asked`: Unix seconds of the last answer. `trouble`: why nothing newer is known. `ended`: the
    session is closed; no frame follows.
    """

    state: Mapping[str, Any]
    samples: tuple[Mapping[str, Any], ...]
    marks: tuple[Mapping[str, Any], ...]
    asked: float
    trouble: str = ""
    ended: bool = False


class Feed:
    """Asks the monitor of session `name` while somebody listens."""

    _shared: dict[str, Feed] = {}  # noqa: RUF012 - one per session and kernel, on purpose
    _sharing = threading.Lock()

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock, self._asking, self._wake = threading.Lock(), threading.Lock(), threading.Event()
        self._listeners: list[Callable[[Frame], None]] = []
        self._thread: threading.Thread | None = None
        self._history: tuple[Any, list[Any]] = (None, [])
        self.frame = Frame({}, (), (), 0.0)

    @classmethod
    def of(cls, name: str) -> Feed:
        """The feed of a session, the same for all its views; a new one where a session of that name had ended."""
        with cls._sharing:
            known = cls._shared.get(name)
            if known is None or known.frame.ended:
                known = cls._shared[name] = cls(name)
            return known

    @property
    def running(self) -> bool:
        """Whether the monitor is being asked."""
        return self._thread is not None and self._thread.is_alive()

    def look(self) -> Frame:
        """Ask once, now: for a view that is about to be drawn. A monitor that does not answer is in the frame."""
        with self._asking:
            self.frame = self._asked()
            return self.frame

    def listen(self, listener: Callable[[Frame], None]) -> None:
        """Call `listener` with every frame, in the sampler's thread, until `leave`."""
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)
            if not self.running and not self.frame.ended:
                self._thread = threading.Thread(target=self._run, name=f"rlbench feed {self.name}", daemon=True)
                self._thread.start()

    def leave(self, listener: Callable[[Frame], None]) -> None:
        """Do not call it any more; the last one to leave ends the sampler."""
        with self._lock:
            self._listeners = [one for one in self._listeners if one != listener]
        self._wake.set()

    def hurry(self) -> None:
        """Something was done: ask now."""
        self._wake.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                listeners = list(self._listeners)
                if not listeners or self.frame.ended:
                    self._thread = None
                    return
            frame = self.look()
            for listener in listeners:
                try:
                    listener(frame)
                except Exception:  # a view that fails is told of and dropped; the others, and the sampler, go on
                    log.exception("rlbench: a view of session %s failed and is not updated any more", self.name)
                    self.leave(listener)
            busy = frame.state.get("running") or frame.state.get("verbs")
            self._wake.wait(BUSY_INTERVAL_S if busy else IDLE_INTERVAL_S)
            self._wake.clear()

    def _asked(self) -> Frame:
        """Fetch what is new, from where the session's file says: a restarted monitor has another url and token."""
        last = self.frame
        try:
            record = client.find(self.name)
        except SessionError as gone:
            said = f"session {self.name} is closed" if registry.parked(self.name) is None else str(gone)
            return dataclasses.replace(last, trouble=said, ended=True)
        try:
            since = last.samples[-1]["time"] + OVERLAP_S if last.samples else 0
            state = client.ask(record, f"/state?history=0&since={since}")
            mark = (state.get("history_total"), state.get("step"), state.get("version"), state.get("branch"))
            if mark != self._history[0]:
                self._history = (mark, client.ask(record, f"/state?history={HISTORY_ASKED}")["history"])
        except (client.MonitorGone, client.Refused) as error:
            return dataclasses.replace(last, trouble=str(error))
        samples = (*last.samples, *state.pop("samples"))[-SAMPLES_KEPT:]
        told = (*last.marks, *state.pop("marks", ()))  # of one that ran the later word counts: it has ended
        marks = tuple({(mark["time"], mark["label"]): mark for mark in told}.values())[-MARKS_KEPT:]
        return Frame(state | {"history": self._history[1]}, samples, marks, time.time())
