"""Processes that may be killed: a job runs over many payloads on a few of them, driven by the calling thread alone."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import IO, Any

import cloudpickle

from rlbench.errors import DataError
from rlbench.rewards.kinds import Failure
from rlbench.sendable import why_not
from rlbench.units import format_seconds

MOST = 4
"""Processes at a time, unless said; never more than cores."""
START_S = 120.0
"""How long a process may take to be ready: it imports what the job needs."""
LOOK_S = 0.2
"""Between two looks at whether to stop."""
TAIL = 400
"""Characters of what a process wrote before it died."""
CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rlbench.rewards.isolation import main; main()"


@dataclass(frozen=True)
class Lost:
    """No answer: `timeout`, or the process died, perhaps of `signal`; `said` goes on from "the reward …"."""

    said: str
    timeout: bool = False
    signal: int = 0


class Lane:
    """One process, and the payload it works on."""

    def __init__(self, opening: bytes) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()  # closed by `end`
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )
        self.unit: int | None = None
        self.ready = False
        self.since = time.perf_counter()
        self._read = b""
        self.send(opening)

    def fileno(self) -> int:
        """What a selector waits for."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, frame: bytes) -> None:
        """Write one frame; the process reads whenever it is idle. That it is gone is seen when reading."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(struct.pack("<Q", len(frame)) + frame)
            self.process.stdin.flush()

    def receive(self) -> list[Any] | None:
        """Whole answers that have arrived; None where the process ended."""
        chunk = os.read(self.fileno(), 1 << 20)
        if not chunk:
            return None
        self._read += chunk
        found = []
        while len(self._read) >= 8 and len(self._read) >= 8 + (size := struct.unpack("<Q", self._read[:8])[0]):
            found.append(json.loads(self._read[8 : 8 + size]))
            self._read = self._read[8 + size :]
        return found

    def end(self, died: bool = False) -> str:
        """Kill it with all it started, and wait until it is gone; says how it had ended, if it had.

        One that `died` by itself is given a moment to be reaped with its own exit code.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0 if died else 0.0)
        code = self.process.returncode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        said = self._last_words()
        self.log.close()
        return _exit(code) + (f"; it wrote {said!r}" if said else "")

    def _last_words(self) -> str:
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - TAIL))
        return self.log.read().decode(errors="replace").strip()


def answers(
    job: Callable[[Any], Any],
    payloads: Iterable[Any],
    count: int,
    lanes: int | None = None,
    timeout_s: float | None = None,
    memory_gib: float | None = None,
    check: Callable[[], None] | None = None,
) -> Generator[tuple[int, Any, float], None, None]:
    """Run a job over `count` payloads in processes of its own; yield (number, answer or `Lost`, seconds) as they end.

    Close the iterator to end all processes. `job` goes there by cloudpickle, its answer comes back as JSON; a
    `prepare()` of its own is called first, untimed. `lanes` processes at a time, None: one per core, MOST at most;
    one is killed after `timeout_s` on a payload, and replaced; `check` is called several times a second, what it
    raises ends all.
    """
    opening = cloudpickle.dumps({"memory_gib": memory_gib, "job": _blob(job, "reward")})
    waiting = enumerate(payloads)
    wanted = min(count, lanes or min(MOST, os.cpu_count() or 1))
    running: list[Lane] = []
    left = count
    try:
        while left:
            while len(running) < min(wanted, left):
                running.append(Lane(opening))
            if check is not None:
                check()
            pause = min(math.inf if check is None else LOOK_S, *(_left(lane, timeout_s) for lane in running))
            ready = wait([lane.fileno() for lane in running], None if pause == math.inf else max(0.0, pause))
            for lane in list(running):
                overdue = _left(lane, timeout_s) <= 0
                arrived = lane.receive() if lane.fileno() in ready else []
                for answer in arrived or ():
                    unit, seconds, overdue = lane.unit, time.perf_counter() - lane.since, False
                    lane.unit = None
                    if not lane.ready:
                        _check_ready(answer)
                        lane.ready = True
                    _feed(lane, waiting)
                    if unit is not None:
                        left -= 1
                        yield unit, answer, seconds
                if arrived is None or overdue:
                    seconds = time.perf_counter() - lane.since
                    said = lane.end(died=arrived is None)
                    running.remove(lane)
                    if not lane.ready:
                        raise DataError(
                            f"a process for the reward {said} before it was ready ({format_seconds(seconds)})"
                        )
                    if lane.unit is not None:
                        left -= 1
                        if arrived is None:
                            code = lane.process.returncode
                            lost = Lost(f"ended its process: it {said}", signal=max(0, -code))
                        else:
                            lost = Lost(f"took longer than {timeout_s:g} s", timeout=True)
                        yield lane.unit, lost, seconds
    finally:
        for lane in running:
            lane.end()


def _blob(value: Any, what: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # whatever a value's own pickling raises
        raise DataError(why_not(what, value, error, "a process of its own")) from error


def _feed(lane: Lane, waiting: Iterator[tuple[int, Any]]) -> None:
    """Give an idle process its next payload, if there is one."""
    following = next(waiting, None)
    if following is not None:
        frame = _blob(following[1], "a completion")
        lane.unit, lane.since = following[0], time.perf_counter()
        lane.send(frame)


def _check_ready(answer: dict[str, Any]) -> None:
    if "broken" in answer:
        failure = Failure.from_plain(answer["broken"])
        shown = DataError(f"the reward cannot be run in a process of its own: {failure.said}")
        shown.full_traceback = failure.trace
        raise shown


def _left(lane: Lane, timeout_s: float | None) -> float:
    """Return the seconds until the process is overdue."""
    allowed = START_S if not lane.ready else None if lane.unit is None else timeout_s
    return math.inf if allowed is None else allowed - (time.perf_counter() - lane.since)


def _exit(code: int | None) -> str:
    if code is None:
        return "was killed"
    if code >= 0:
        return f"exited with code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
