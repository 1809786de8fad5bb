"""One sampler per session, shared by all views of it: asks the monitor's endpoint and tells the views what it said.

It runs in a thread of the kernel, so views move while a cell runs. It ends with the last view or with the session.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlbench.errors import SessionError
from rlbench.monitor import client

BUSY_INTERVAL_S, IDLE_INTERVAL_S = 0.5, 1.0
"""The monitor samples twice a second; nobody needs to be asked more often than that."""
SAMPLES_KEPT, MARKS_KEPT = 1200, 300
HISTORY_ASKED = 100
OVERLAP_S = 0.001

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frame:
    """What is known of a session at one moment.

    Attributes:
        state: the last answer of `GET /state`, with the last step records in `history`.
        samples, marks: all that are kept, oldest first.
        asked: Unix seconds of the last answer.
        trouble: why nothing newer is known; empty where the monitor answers.
        ended: the session is closed; no frame follows.
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
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._listeners: list[Callable[[Frame], None]] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._state: dict[str, Any] = {}
        self._history: tuple[Any, list[Any]] = (None, [])
        self._samples: collections.deque[dict[str, Any]] = collections.deque(maxlen=SAMPLES_KEPT)
        self._marks: dict[tuple[float, str], dict[str, Any]] = {}
        self._asked = 0.0
        self._trouble = ""
        self._ended = False

    @classmethod
    def of(cls, name: str) -> Feed:
        """The feed of a session, the same for all its views; a new one where a session of that name had ended."""
        with cls._sharing:
            known = cls._shared.get(name)
            if known is None or known._ended:
                known = cls._shared[name] = cls(name)
            return known

    @property
    def frame(self) -> Frame:
        """What is known now."""
        return Frame(
            self._state, tuple(self._samples), tuple(self._marks.values()), self._asked, self._trouble, self._ended
        )

    @property
    def running(self) -> bool:
        """Whether the monitor is being asked."""
        return self._thread is not None and self._thread.is_alive()

    def look(self) -> Frame:
        """Ask once, now: for a view that is about to be drawn. A monitor that does not answer is in the frame."""
        with self._asking:
            self._ask()
        return self.frame

    def listen(self, listener: Callable[[Frame], None]) -> None:
        """Call `listener` with every frame, in the sampler's thread, until `leave`."""
        with self._lock:
            if listener not in self._listeners:
                self._listeners.append(listener)
            if not self.running and not self._ended:
                self._thread = threading.Thread(target=self._run, name=f"rlbench feed {self.name}", daemon=True)
                self._thread.start()

    def leave(self, listener: Callable[[Frame], None]) -> None:
        """Do not call it any more; the last one to leave ends the sampler."""
        with self._lock:
            self._listeners = [one for one in self._listeners if one is not listener and one != listener]
        self._wake.set()

    def hurry(self) -> None:
        """Something was done: ask now."""
        self._wake.set()

    def _run(self) -> None:
        while True:
            with self._lock:
                listeners = list(self._listeners)
                if not listeners or self._ended:
                    self._thread = None
                    return
            frame = self.look()
            for listener in listeners:
                self._tell(listener, frame)
            busy = frame.state.get("running") or frame.state.get("verbs")
            self._wake.wait(BUSY_INTERVAL_S if busy else IDLE_INTERVAL_S)
            self._wake.clear()

    def _tell(self, listener: Callable[[Frame], None], frame: Frame) -> None:
        """One view that fails is told of and dropped; the others, and the sampler, go on."""
        try:
            listener(frame)
        except Exception:
            log.exception("rlbench: a view of session %s failed and is not updated any more", self.name)
            self.leave(listener)

    def _ask(self) -> None:
        """Fetch what is new, from where the session's file says: a restarted monitor has another url and token."""
        try:
            record = client.find(self.name)
        except SessionError:
            self._trouble, self._ended = f"session {self.name} is closed", True
            return
        try:
            since = self._samples[-1]["time"] if self._samples else 0.0
            state = client.ask(record, f"/state?history=0&since={since + OVERLAP_S if since else 0}")
            mark = (state.get("history_total"), state.get("step"), state.get("version"), state.get("branch"))
            if mark != self._history[0]:
                full = client.ask(record, f"/state?history={HISTORY_ASKED}")
                self._history = (mark, full["history"])
        except (client.MonitorGone, client.Refused) as error:
            self._trouble = str(error)
            return
        self._samples.extend(state.pop("samples"))
        self._keep_marks(state.pop("marks", ()))
        self._state = {**state, "history": self._history[1]}
        self._asked, self._trouble = time.time(), ""

    def _keep_marks(self, marks: Any) -> None:
        """A mark is known by its start and label; one that ran is replaced once it has ended."""
        for mark in marks:
            self._marks[mark["time"], mark["label"]] = mark
        for old in list(self._marks)[: max(0, len(self._marks) - MARKS_KEPT)]:
            del self._marks[old]
