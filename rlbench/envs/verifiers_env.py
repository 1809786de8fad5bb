"""Tasksets of the verifiers library as agents: played by a process in an environment of its own, at run URLs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rlbench.errors import DataError, RLBenchError, Suggesting

RUNNER = Path(__file__).with_name("verifiers_runner.py")
INSTALL = (
    "install it in an environment of its own, as it may want other versions than rlbench: "
    "`python -m venv verifiers && verifiers/bin/pip install 'verifiers>=0.4' uv`, then python=\"verifiers/bin/python\""
)
TOLD = 2000
"""Characters of what the process printed last, in errors."""
END_S = 5.0


class VerifiersError(RLBenchError):
    """An episode, or the process that plays it, failed."""


class Run(Protocol):
    """What `session.collect` hands out."""

    url: str
    key: str
    model: str
    task: Any


def from_verifiers(
    taskset: str | Mapping[str, Any],
    *,
    python: str | os.PathLike[str] | None = None,
    harness: str | Mapping[str, Any] = "null",
    runtime: str | Mapping[str, Any] = "subprocess",
    env: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    concurrency: int = 16,
) -> VerifiersEnv:
    """Make an agent of a taskset of verifiers (0.4 or later): its tasks, harness and rewards, on the live policy.

        env = rb.envs.from_verifiers("gsm8k-v1", python="verifiers/bin/python")
        with session.collect(env.tasks(16, seed=0), n=8) as runs:
            traces = runs.each(env.play)
        session.train_step(traces.batch(advantage=rb.rl.group_normalized()))

    Args:
        taskset: its id, an installed package's or a module's beside the notebook; or its options, `{"id": …, …}`.
        python: the interpreter of the environment that verifiers is installed in; None: this one.
        harness: what the agent runs in: "null" chats and calls the tasks' tools. An id, or options with one.
        runtime: where that runs: "subprocess", on this machine and not isolated, or "docker"; or options with a `type`.
        env: more of verifiers' `[env]` block, such as `{"timeout": {"episode": 60}}`.
        sampling: temperature, top_p, max_tokens of each call; of one training batch, one temperature.
        concurrency: episodes at a time; others wait for their turn.

    Raises DataError for arguments that mean nothing, VerifiersError where the taskset cannot be loaded, with what
    verifiers said.
    """
    if concurrency < 1:
        raise DataError(f"from_verifiers: concurrency={concurrency}; at least one episode is played at a time")
    agent = {"harness": _with(harness, "id", "harness"), "runtime": _with(runtime, "type", "runtime")}
    block = {**(env or {}), "taskset": _with(taskset, "id", "taskset")}
    return VerifiersEnv(
        _interpreter(python), {"env": block, "agent": agent, "concurrency": concurrency}, sampling or {}
    )


def _with(value: str | Mapping[str, Any], key: str, option: str) -> dict[str, Any]:
    """Return options, of a name those that have it alone."""
    options = {key: value} if isinstance(value, str) else dict(value)
    if not options.get(key):
        raise DataError(f"from_verifiers: {option}={value!r}; give its {key}, or options that have one")
    return options


def _interpreter(python: str | os.PathLike[str] | None) -> str:
    if python is None:
        if importlib.util.find_spec("verifiers") is None:
            raise DataError(f"from_verifiers needs verifiers, which is not installed here; {INSTALL}")
        return sys.executable
    path = os.path.abspath(os.path.expanduser(python))  # links stay: they are what makes it an environment's
    if not os.access(path, os.X_OK):
        raise DataError(f"from_verifiers: python={str(python)!r} is no interpreter; {INSTALL}")
    return path


class VerifiersEnv(Suggesting):
    """See `from_verifiers`. The process begins with it and ends with it, or with `close()`."""

    def __init__(self, python: str, options: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        self.name = str(options["env"]["taskset"]["id"])
        self._sampling = dict(sampling)
        self._process = _Process(python)
        self._ended = weakref.finalize(self, self._process.end)
        try:
            loaded = self._process.ask(do="load", **options).answer.result()
        except BaseException:
            self.close()
            raise
        self.infinite = bool(loaded["infinite"])
        """Whether its tasks never end."""

    def __repr__(self) -> str:
        return f"from_verifiers({self.name!r})"

    def __enter__(self) -> VerifiersEnv:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def tasks(self, count: int | None = None, seed: int | None = None) -> list[dict[str, Any]]:
        """Return tasks for `session.collect`: `idx`, `name` and `prompt` of each.

        Args:
            count: the first so many; None: all.
            seed: shuffle before that; None: in their order.
        """
        if self.infinite and (count is None or seed is not None):
            raise DataError(f"{self!r} has tasks without end: say how many, tasks(count), without a seed")
        if count is not None and count < 1:
            raise DataError(f"tasks({count}): at least one task")
        return list(self._process.ask(do="tasks", count=count, seed=seed).answer.result()["tasks"])

    async def play(self, run: Run) -> float:
        """Play one episode of a run's task at its URL; returns the sum of its rewards.

        Raises VerifiersError where verifiers counts it as failed. Cancelled, it ends the episode.
        """
        if not isinstance(run.task, Mapping) or "idx" not in run.task:
            raise DataError(f"{self!r} plays its own tasks: session.collect(env.tasks(…)); this run has {run.task!r}")
        fields = {"idx": run.task["idx"], "url": run.url, "key": run.key, "model": run.model}
        asked = self._process.ask(do="play", **fields, sampling=self._sampling)
        try:
            return float((await asyncio.wrap_future(asked.answer))["reward"])
        except asyncio.CancelledError:
            self._process.stop(asked)
            raise

    def close(self) -> None:
        """End the process with all that it started."""
        self._ended()


class _Asked(NamedTuple):
    """A question's number, and what becomes of it."""

    number: int
    answer: concurrent.futures.Future[dict[str, Any]]


class _Process:
    """The runner's process: questions go in by number, answers come out in any order."""

    def __init__(self, python: str) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, concurrent.futures.Future[dict[str, Any]]] = {}
        self._over = False
        self._said = tempfile.TemporaryFile()
        path = os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])  # where its uv may be
        self._popen = subprocess.Popen(
            [python, "-P", "-u", str(RUNNER)],  # -P: modules beside the runner hide none of others
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | {"PATH": path},
            start_new_session=True,
        )
        threading.Thread(target=self._hear, name="rlbench verifiers", daemon=True).start()

    def ask(self, **question: Any) -> _Asked:
        """Send a question; its answer, or VerifiersError, comes by the future."""
        asked = _Asked(next(self._numbers), concurrent.futures.Future())
        self._waiting[asked.number] = asked.answer
        self._send(asked.number, question)
        if self._over:  # what it started may hold its input open, which then takes questions that nobody reads
            self._fail([asked.number])
        return asked

    def stop(self, asked: _Asked) -> None:
        """Give up what was asked; no answer comes."""
        self._waiting.pop(asked.number, None)
        self._send(asked.number, {"do": "stop"})

    def end(self) -> None:
        """Let the process end, and kill what is left of its group."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            self._popen.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def _send(self, number: int, question: Mapping[str, Any]) -> None:
        assert self._popen.stdin is not None
        line = json.dumps({"id": number, **question}) + "\n"
        try:
            with self._lock:
                self._popen.stdin.write(line.encode())
                self._popen.stdin.flush()
        except (OSError, ValueError):  # it has ended, or was closed
            self._fail([number])

    def _hear(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            answer = json.loads(line)
            future = self._waiting.pop(answer.pop("id"), None)
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if "error" in answer:
                future.set_exception(VerifiersError(answer["error"]))
            else:
                future.set_result(answer)
        self._popen.wait()
        self._over = True
        self._fail(list(self._waiting))

    def _fail(self, numbers: list[int]) -> None:
        """Tell who waits that the process has ended, and what it said last."""
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()[-TOLD:]
        status = self._popen.poll()
        for number in numbers:
            future = self._waiting.pop(number, None)
            if future is not None and future.set_running_or_notify_cancel():
                about = f"the process that plays verifiers' episodes has ended (status {status})"
                future.set_exception(VerifiersError(f"{about}: {said}" if said else about))
