"""How a function is run over completions: one by one, as coroutines side by side, or in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlbench.errors import DataError
from rlbench.rewards.board import Board, Failure, Outcome, Reward
from rlbench.rewards.kinds import Scorer, attempted, is_async, name_of, outcomes
from rlbench.rewards.lanes import Lost, answers

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout

CONCURRENT = 32
"""Coroutines at a time, unless said."""
FAREWELL_S = 2.0
"""How long an interrupt waits for cancelled coroutines to end."""
OPTIONS = ("concurrency", "timeout_s", "isolate", "memory_gib")


@dataclass(frozen=True)
class Function(Scorer):
    """A function with the way it is run; made by `rb.rewards.function` and `rb.rewards.batched`, see there."""

    fn: Callable[..., Any]
    batched: bool = False
    size: int | None = None
    concurrency: int | None = None
    timeout_s: float | None = None
    isolate: bool = False
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        _check(self)

    def __repr__(self) -> str:
        given = [f"{f.name}={v!r}" for f in fields(self)[2:] if (v := getattr(self, f.name)) != f.default]
        return f"{'batched' if self.batched else 'function'}({', '.join([name_of(self.fn), *given])})"

    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        units = self._units(len(rollouts))
        if is_async(self.fn):
            attempt = partial(_attempted_async, self.fn, rollouts, self.batched, self.timeout_s)
            side_by_side(attempt, units, self.concurrency or CONCURRENT, board)
        elif self.isolate:
            self._in_processes(rollouts, units, board)
        else:
            for unit in units:
                board.check()
                started = time.perf_counter()
                found = attempted(self.fn, [rollouts[i] for i in unit], self.batched)
                board.put_all(unit, found, time.perf_counter() - started)

    def _units(self, count: int) -> list[range]:
        """Return which completions each call is given."""
        size = (self.size or max(1, count)) if self.batched else 1
        return [range(first, min(first + size, count)) for first in range(0, count, size)]

    def _in_processes(self, rollouts: Sequence[Rollout], units: Sequence[range], board: Board) -> None:
        payloads = ([rollouts[i] for i in unit] for unit in units)
        job = Job(self.fn, self.batched)
        found = answers(job, payloads, len(units), self.concurrency, self.timeout_s, self.memory_gib, board.check)
        with contextlib.closing(found):
            for k, answer, seconds in found:
                unit = units[k]
                if isinstance(answer, Lost):
                    board.put_all(unit, [Failure(f"the reward {answer}")] * len(unit), seconds)
                else:
                    board.put_all(unit, [outcome_of(given) for given in answer], seconds)


@dataclass(frozen=True)
class Job:
    """What a process of its own does with completions: the answer is made of JSON's types."""

    fn: Callable[..., Any]
    batched: bool

    def __call__(self, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
        return [plain(outcome) for outcome in attempted(self.fn, rollouts, self.batched)]


def plain(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome made of JSON's types."""
    if isinstance(outcome, Failure):
        return outcome.plain()
    return {"reward": outcome.value, "components": dict(outcome.components)}


def outcome_of(given: dict[str, Any]) -> Outcome:
    """Return what `plain` was given."""
    return Failure.from_plain(given) if "said" in given else Reward(given["reward"], given["components"])


def function(
    fn: Callable[..., Any],
    *,
    concurrency: int | None = None,
    timeout_s: float | None = None,
    isolate: bool = False,
    memory_gib: float | None = None,
) -> Function:
    """A function of one `Rollout` with the way it is to be run, as a part of `weighted` or `mixture` needs it.

    `rollouts.score(fn, timeout_s=…)` does the same for a function alone.

    Args:
        fn: plain or async, returns a number, a mapping of numbers with "reward", or a `Reward`.
        concurrency: how many run at a time: coroutines of an async function (default 32), or with `isolate` processes
            (default: one per core, four at most).
        timeout_s: seconds one call may take; the completion has an error then. A plain function needs `isolate`, as
            nothing else can end one that hangs.
        isolate: run a plain function in fresh processes, which are killed at the timeout, on Ctrl-C and when memory
            runs out, and replaced. It sees copies; what it changes is lost. Guards against hangs and crashes, not
            against malice: the process may do what you may do.
        memory_gib: GiB one such process may allocate beyond what Python itself takes; more raises MemoryError in it.
    """
    return Function(fn, False, None, concurrency, timeout_s, isolate, memory_gib)


def batched(
    fn: Callable[..., Any],
    size: int | None = None,
    *,
    concurrency: int | None = None,
    timeout_s: float | None = None,
    isolate: bool = False,
    memory_gib: float | None = None,
) -> Function:
    """Mark a function of many completions: `fn(list of Rollouts) -> list of numbers`, in their order.

        @rb.rewards.batched
        def reward(rollouts): ...

    Args:
        fn: plain or async; each value it returns may be what a function of one completion may return.
        size: completions per call; None gives it all at once.
        concurrency, isolate, memory_gib: as in `function`.
        timeout_s: seconds per call, that is per batch.
    """
    return Function(fn, True, size, concurrency, timeout_s, isolate, memory_gib)


def as_scorer(fn: Any, **options: Any) -> Scorer:
    """Anything that may be a reward as a `Scorer`; options as in `function`, None and False mean not given."""
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    if isinstance(fn, Function):
        return replace(fn, **given)
    if isinstance(fn, Scorer):
        if given:
            raise DataError(
                f"{', '.join(given)} would have no effect on {fn!r}: give such options where it is made, and those "
                "of a function inside of it by rb.rewards.function(fn, …)"
            )
        return fn
    if not callable(fn):
        raise DataError(f"a reward is a function or one of rb.rewards, got {type(fn).__name__} {str(fn)[:40]!r}")
    return Function(fn, **given)


def side_by_side(
    attempt: Callable[[Sequence[int]], Awaitable[list[Outcome]]], units: Iterable[range], limit: int, board: Board
) -> None:
    """Run coroutines on a loop in a thread of their own, as the caller's loop may be running: Jupyter's is.

    `attempt` gives an outcome for each position of a unit, `limit` run at a time, `board` is told of each as it ends.
    """
    waiting = iter(units)
    started, ended, trouble = threading.Event(), threading.Event(), []
    cancel: list[Callable[[], object]] = []

    async def worker() -> None:
        for unit in waiting:
            begun = time.perf_counter()
            found = await attempt(unit)
            board.put_all(unit, found, time.perf_counter() - begun)

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        started.set()
        await asyncio.gather(*(worker() for _ in range(limit)))

    def run() -> None:
        try:
            asyncio.run(main())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # a KeyboardInterrupt raised in the function is one for the caller, too
            trouble.append(error)
        finally:
            started.set()
            ended.set()

    thread = threading.Thread(target=run, name="rlbench-rewards", daemon=True)
    thread.start()
    try:
        while not ended.wait(0.2):
            board.check()
        thread.join()
    except BaseException:
        started.wait(FAREWELL_S)
        with contextlib.suppress(RuntimeError, IndexError):  # it ended by itself meanwhile
            cancel[0]()
        ended.wait(FAREWELL_S)
        raise
    if trouble:
        raise trouble[0]


async def _attempted_async(
    fn: Callable[..., Any], rollouts: Sequence[Rollout], batched: bool, timeout_s: float | None, unit: Sequence[int]
) -> list[Outcome]:
    mine = [rollouts[i] for i in unit]
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            value = await (fn(mine) if batched else fn(mine[0]))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # it is us who are cancelled, not what the reward waited for
            raise
        return [Failure.of(error)] * len(mine)
    except (Exception, SystemExit) as error:
        if clock.expired():
            return [Failure(f"the reward took longer than {timeout_s:g} s")] * len(mine)
        return [Failure.of(error)] * len(mine)
    return outcomes(value, len(mine), batched)


def _check(how: Function) -> None:
    """Refuse what has no effect, and values that cannot be."""
    name = name_of(how.fn)
    if not callable(how.fn) or isinstance(how.fn, Scorer):
        raise DataError(f"wanted a function of a Rollout, got {type(how.fn).__name__} {str(how.fn)[:40]!r}")
    if how.memory_gib is not None and not how.isolate:
        raise DataError(f"memory_gib limits a process of its own: add isolate=True to {name}")
    if is_async(how.fn) and how.isolate:
        raise DataError(
            f"{name} is async, and isolate=True is for plain functions: leave it out (timeout_s cancels a coroutine)"
        )
    if not is_async(how.fn) and not how.isolate:
        if how.timeout_s is not None:
            raise DataError(
                f"timeout_s: {name} is a plain function, and one that hangs can only be ended in a process of its own: "
                "add isolate=True"
            )
        if how.concurrency is not None:
            raise DataError(
                f"concurrency: {name} is a plain function, run one after the other here: add isolate=True for several "
                "processes, or define it with `async def`"
            )
    for option in ("size", "concurrency"):
        value = getattr(how, option)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise DataError(f"{option}: wanted a whole number from 1 on, got {value!r}")
    for option in ("timeout_s", "memory_gib"):
        value = getattr(how, option)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise DataError(f"{option}: wanted a number above 0, got {value!r}")
