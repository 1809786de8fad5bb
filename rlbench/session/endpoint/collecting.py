"""`session.collect(…)`: whole agent programs as rollouts, each with a run at the endpoint."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlbench.data.prompts.prompt import Prompt
from rlbench.data.runs.traces import Run, Traces
from rlbench.envs.calls import EnvCalls
from rlbench.errors import DataError, Stopped, Suggesting
from rlbench.session.core import SessionCore
from rlbench.session.endpoint.endpoint import POLICY, endpoint, ends, kept
from rlbench.traces import user_stacklevel

LOOK_S = 0.2
TOLD = 400
"""Characters of what a failed command printed last."""


@dataclass(eq=False)
class AgentRun(Suggesting):
    """One run for one agent program: `url` and `key` are what its OpenAI client takes, `task` what it is to do.

    `reward`: what the program returned or printed, or whoever reads this sets; `error`: why it failed.
    """

    name: str
    url: str
    key: str = field(repr=False)
    group: str
    task: Any = None
    reward: float | None = None
    error: str = ""
    output: str = field(default="", repr=False)
    model: str = POLICY

    @property
    def env(self) -> dict[str, str]:
        """What OpenAI's clients read of their environment, the model's name and the task, as text or JSON."""
        task = self.task.content if isinstance(self.task, Prompt) else self.task
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_KEY": self.key,
            "RLBENCH_MODEL": self.model,
            "RLBENCH_TASK": task if isinstance(task, str) else json.dumps(task, default=str),
        }


class Collection(Sequence[AgentRun], Suggesting):
    """Runs handed out, `n` for each task. Leaving the block ends what `each` has not ended."""

    def __init__(self, core: SessionCore, runs: Sequence[AgentRun]) -> None:
        self._core, self._runs, self._begins = core, tuple(runs), ends(core)
        self._processes: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[AgentRun]:
        return iter(self._runs)

    def __getitem__(self, index: Any) -> Any:
        return self._runs[index]

    def __enter__(self) -> Collection:
        return self

    def __exit__(self, *exc: object) -> None:
        self._kill()

    def each(
        self, agent: Callable[[AgentRun], Any] | Sequence[str], *, concurrency: int = 16, timeout_s: float | None = None
    ) -> Traces:
        """Run a program for each run, several at a time; returns `traces`.

        Args:
            agent: a function of an `AgentRun`, plain or async, that returns its reward or None; or a command, which
                finds `AgentRun.env` in its environment; its reward is what it printed last, where that is a number.
            concurrency: programs at a time; of async functions all run at once.
            timeout_s: for one program. A command is killed; a plain function's thread cannot be, it ends by itself.

        One that raises, takes too long or ends with a status is kept with its `error`, is not trained on, and is
        counted in a warning. `.partial` of `Stopped` (Ctrl-C) holds the traces there are.
        """
        if isinstance(agent, str):
            raise DataError(f"each({agent!r}): give a command as a list of words, as subprocess does: ['python', …]")
        calls = EnvCalls(timeout_s if callable(agent) else None, concurrency, "timeout_s")
        for run in self._runs:
            calls.start(run, partial(agent, run) if callable(agent) else partial(self._command, agent, run, timeout_s))
        try:
            while calls.pending:
                for call in calls.finished(LOOK_S):
                    _note(call.key, call.value, call.error)
        except KeyboardInterrupt:
            for run in calls.give_up(lambda run: False):
                run.error = "stopped"
            self._kill()
            over = sum(1 for run in self._runs if run.reward is not None or run.error)
            raise Stopped(f"collect stopped: {over} of {len(self)} runs are over", self.traces) from None
        finally:
            calls.close()
        failed = [run for run in self._runs if run.error]
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(self)} runs failed and are not trained on; the first, {failed[0].name}: "
                f"{failed[0].error}",
                stacklevel=user_stacklevel(),
            )
        return self.traces

    @property
    def traces(self) -> Traces:
        """What the runs did so far, by task, with the rewards they have."""
        whole = kept(self._core, {run.name for run in self._runs}.__contains__, self._begins)
        calls = {run.name: run.calls for run in whole}
        runs = (Run(r.name, calls.get(r.name, ()), r.group, _label(r.task), r.reward, r.error) for r in self._runs)
        return replace(whole, runs=tuple(runs))

    def _command(self, command: Sequence[str], run: AgentRun, timeout_s: float | None) -> float | None:
        """Run a command to its end; return the number it printed last, if it is one."""
        process = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | run.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with self._lock:
            self._processes.add(process)
        try:
            run.output, told = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it did not end within timeout_s={timeout_s:g}") from None
        finally:
            _end(process)
            with self._lock:
                self._processes.discard(process)
        if process.returncode:
            raise ChildProcessError(f"it ended with status {process.returncode}: {told.strip()[-TOLD:]}")
        try:
            return float((run.output.split() or [""])[-1])
        except ValueError:
            return None

    def _kill(self) -> None:
        with self._lock:
            for process in self._processes:
                _end(process)

    def __repr__(self) -> str:
        failed = sum(1 for run in self._runs if run.error)
        groups = len({run.group for run in self._runs})
        return f"Collection({len(self)} runs of {groups} tasks{f', {failed} failed' if failed else ''})"


def collect(core: SessionCore, tasks: int | Sequence[Any], n: int = 8) -> Collection:
    """Hand out `n` runs for each task, so that a whole agent program is one rollout: `with session.collect(…) as runs`.

        with session.collect(tasks, n=8) as runs:
            traces = runs.each(agent, timeout_s=60)
        session.train_step(traces.batch(advantage=rb.rl.group_normalized()))

    Args:
        tasks: one each for a group of runs that an advantage compares: anything that the program understands; or how
            many groups there are. The label of a `Prompt`, or of a row with one, goes with the rollouts.
        n: runs for each.
    """
    listed = list(range(tasks)) if isinstance(tasks, int) else list(tasks)
    if not listed or n < 1:
        raise DataError(f"collect: {len(listed)} tasks with n={n} are no run: give at least one of both")
    opened, batch = endpoint(core), secrets.token_hex(4)
    runs = []
    for group, task in enumerate(listed):
        for number in range(n):
            name = f"{batch}.{group}.{number}"
            runs.append(AgentRun(name, opened.run(name), opened.key, f"{batch}.{group}", task))
    return Collection(core, runs)


def _note(run: AgentRun, value: Any, error: BaseException | None) -> None:
    """Note how a program ended."""
    if error is None and value is not None:
        try:
            reward = float(value)
        except (TypeError, ValueError):
            error = TypeError(f"it returned {value!r:.60}: wanted its reward, a number, or None")
        else:
            run.reward, error = reward, None if math.isfinite(reward) else ValueError(f"its reward is {reward}")
    if error is not None:
        run.reward, run.error = None, f"{type(error).__name__}: {error}"


def _label(task: Any) -> Any:
    return task.get("label") if isinstance(task, Mapping) else getattr(task, "label", None)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process and what is left of what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
