"""Sides of a comparison as child processes that take turns: one works, the others sleep.

A side is started once, warms up once, and then does one piece of work whenever it is asked: so the sides alternate
step by step, at the same minute, on the same machine. Standard library alone: sides run in other environments too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Record = dict[str, Any]
ENDED = "ended at "
"""What a process that `seconds_to_end` times prints before the time."""
READY_S, TURN_S, END_S = 600.0, 600.0, 60.0


class SideError(RuntimeError):
    """A side of a comparison failed; the text is the last line of what it said."""


class Side:
    """A child process that does one piece of work at a time.

    Args:
        name: in messages.
        command: what runs it; its code calls `Requests` or `serve`.
        log: file for what it prints.
        environment: variables beside this process's own.
    """

    def __init__(self, name: str, command: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name, self._log = name, log
        with log.open("w") as said:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": search_path(), **environment},
            )

    def ready(self) -> Record:
        """Wait until it has started; return what it says of itself."""
        return self._answer(READY_S)

    def turn(self, **request: Any) -> Record:
        """Let it do one piece of work; return its record."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise SideError(f"{self.name}: {self._last_words()}") from None
        return self._answer(TURN_S)

    def close(self) -> None:
        """End it: what it has started it ends itself, if it can."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _answer(self, limit_s: float) -> Record:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            self._process.kill()
            raise SideError(f"{self.name}: no answer within {limit_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise SideError(f"{self.name}: {self._last_words()}")
        answer: Record = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"ended with status {self._process.returncode} and said nothing"


class Requests:
    """The side's end: make it before heavy imports; whatever else is printed from then on goes to the log."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._requests = os.fdopen(os.dup(0), "r")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # children of this process read nothing of ours

    def answer(self, record: Record) -> None:
        """Give the result of the start, or of the turn."""
        print(json.dumps(record), file=self._answers, flush=True)

    def next(self) -> Record | None:
        """Wait for the next turn; None at the end."""
        line = self._requests.readline()
        return json.loads(line) if line else None


def serve(requests: Requests, make: Callable[[], Any]) -> None:
    """Make what works, then call its `turn(**request)` turn by turn, and its `close`, if it has one, at the end.

    An exception ends the side, and its text is the answer.
    """
    try:
        working = make()
        requests.answer({"ready": True})
        while (request := requests.next()) is not None:
            requests.answer(working.turn(**request))
    except Exception as error:
        traceback.print_exc()
        requests.answer({"error": one_line(error)})
        raise SystemExit(1) from error
    if hasattr(working, "close"):
        working.close()


def one_line(error: BaseException) -> str:
    """Return the line of an error's report that says what it is: its class and the first line of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def seconds_to_end(arguments: list[str], log: Path, environment: Mapping[str, str], limit_s: float = READY_S) -> float:
    """Run a Python that prints `ENDED` and `time.time()`; return the seconds from its start to then.

    SideError with its last line where it fails.
    """
    begin = time.time()
    with log.open("w") as said:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": search_path(), **environment},
            timeout=limit_s,
        )
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if done.returncode or not lines:
        raise SideError(f"{log.stem}: {lines[-1] if lines else f'status {done.returncode}'}")
    times = [line for line in lines if line.startswith(ENDED)]
    return float(times[-1].removeprefix(ENDED)) - begin


def search_path() -> str:
    """Return PYTHONPATH with this checkout first."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
