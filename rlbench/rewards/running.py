"""How a function is run over completions: one by one, as coroutines side by side, or in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rlbench.errors import DataError
from rlbench.rewards import elsewhere
from rlbench.rewards.kinds import Board, Failure, Outcome, Reward, Scorer, attempted, is_async, outcomes
from rlbench.rewards.lanes import Lost, answers
from rlbench.user_code import name_of

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout

CONCURRENT = 32
"""Coroutines at a time, unless said."""
FAREWELL_S = 2.0
"""How long an interrupt waits for what it cancelled to end."""


@dataclass(frozen=True, repr=False)
class function(Scorer):
    """A function of one `Rollout` with the way it is to be run, as a part of `weighted` or `mixture` needs it.

    Args:
        fn: plain or async, returns a number, a mapping of numbers with "reward", or a `Reward`.
        concurrency: coroutines of an async function at a time (default 32), or processes (one per core, four at most).
        timeout_s: seconds one call may take; the completion has an error then. A plain function needs `isolate`.
        isolate: run a plain function in fresh processes, which are killed at the timeout, on Ctrl-C and when memory
            runs out, and replaced. Guards against hangs and crashes, not malice: the process may do what you may do.
        memory_gib: GiB one such process may allocate beyond what Python itself takes; more raises MemoryError in it.
    """

    many: ClassVar[bool] = False
    fn: Callable[..., Any]
    _: KW_ONLY
    concurrency: int | None = None
    timeout_s: float | None = None
    isolate: bool = False
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        """Refuse what has no effect, and values that cannot be; take functions of other systems as ours."""
        object.__setattr__(self, "fn", elsewhere.adapted(self.fn, is_async(self.fn)))
        name, later = name_of(self.fn), is_async(self.fn)
        plain = not later and not self.isolate
        for wrong, said in (
            (not callable(self.fn) or isinstance(self.fn, Scorer), f"wanted a function of a Rollout, got {name[:40]}"),
            (self.memory_gib is not None and not self.isolate, f"memory_gib: {name} needs a process: add isolate=True"),
            (later and self.isolate, f"{name} is async, and isolate=True is for plain functions: leave it out"),
            (plain and self.timeout_s is not None, f"timeout_s ends a process, not plain {name}: add isolate=True"),
            (plain and self.concurrency is not None, f"concurrency: {name} is plain: add isolate=True or `async def`"),
        ):
            if wrong:
                raise DataError(said)
        for option in ("size", "concurrency"):
            value = getattr(self, option, None)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise DataError(f"{option}: wanted a whole number from 1 on, got {value!r}")
        for option in ("timeout_s", "memory_gib"):
            value = getattr(self, option)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise DataError(f"{option}: wanted a number above 0, got {value!r}")

    def __repr__(self) -> str:
        options = [f"{f.name}={v!r}" for f in fields(self)[1:] if (v := getattr(self, f.name)) != f.default]
        return f"{type(self).__name__}({', '.join([name_of(self.fn), *options])})"

    def score_all(self, rollouts: Sequence[Rollout], board: Board) -> None:
        size = getattr(self, "size", 1) or max(1, len(rollouts))  # completions that each call is given
        units = cut(len(rollouts), size)
        if is_async(self.fn):
            attempt = partial(_attempted_async, self.fn, rollouts, self.many, self.timeout_s)
            side_by_side(attempt, units, self.concurrency or CONCURRENT, board)
        elif self.isolate:
            self._in_processes(rollouts, units, board)
        else:
            for unit in units:
                board.check()
                started = time.perf_counter()
                found = attempted(self.fn, [rollouts[i] for i in unit], self.many)
                board.put_all(unit, found, time.perf_counter() - started)

    def _in_processes(self, rollouts: Sequence[Rollout], units: Sequence[range], board: Board) -> None:
        payloads = ([rollouts[i] for i in unit] for unit in units)
        job = partial(_plain_outcomes, self.fn, self.many)
        found = answers(job, payloads, len(units), self.concurrency, self.timeout_s, self.memory_gib, board.check)
        with contextlib.closing(found):
            for k, answer, seconds in found:
                unit = units[k]
                if isinstance(answer, Lost):
                    board.put_all(unit, [Failure(f"the reward {answer.said}")] * len(unit), seconds)
                else:
                    board.put_all(unit, [_outcome_of(plain) for plain in answer], seconds)


@dataclass(frozen=True, repr=False)
class batched(function):
    """A function of many completions: `fn(list of Rollouts) -> list of numbers`, in their order; `@rb.rewards.batched`.

    `size` completions per call, None gives it all at once; `timeout_s` is per batch. The rest as in `function`.
    """

    many: ClassVar[bool] = True
    size: int | None = None


def as_scorer(fn: Any, **options: Any) -> Scorer:
    """Anything that may be a reward as a `Scorer`; options as in `function`, None and False mean not given."""
    changed = {name: value for name, value in options.items() if value is not None and value is not False}
    if isinstance(fn, function):
        return replace(fn, **changed)
    if isinstance(fn, Scorer):
        if changed:
            raise DataError(
                f"{', '.join(changed)} would have no effect on {fn!r}: give such options where it is made, and those "
                "of a function inside of it by rb.rewards.function(fn, …)"
            )
        return fn
    if not callable(fn):
        raise DataError(f"a reward is a function or one of rb.rewards, got {type(fn).__name__} {str(fn)[:40]!r}")
    ours = elsewhere.adapted(fn, is_async(fn))
    return batched(ours, **changed) if elsewhere.takes_many(ours) else function(ours, **changed)


def cut(count: int, size: int) -> list[range]:
    """Cut `count` completions into the positions of each call."""
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def run_threads(work: Callable[[], None], count: int, name: str, board: Board, cancel: Callable[[], None]) -> None:
    """Run `work` in `count` threads until all end; where the caller is stopped meanwhile, `cancel` ends them."""
    trouble: list[BaseException] = []
    ended = threading.Semaphore(0)

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # for the caller, whose thread this is not: a KeyboardInterrupt, too
            trouble.append(error)
        finally:
            ended.release()

    threads = [threading.Thread(target=guarded, name=f"rlbench-{name}-{k}", daemon=True) for k in range(count)]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:  # not by join: a Ctrl-C inside of it marks a running thread as ended (CPython's gh-90882)
            while not ended.acquire(timeout=0.1):
                board.check()
    except BaseException:
        cancel()
        deadline = time.monotonic() + FAREWELL_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        raise
    for thread in threads:
        thread.join()
    if trouble:
        raise trouble[0]


def side_by_side(
    attempt: Callable[[Sequence[int]], Awaitable[list[Outcome]]], units: Iterable[range], limit: int, board: Board
) -> None:
    """Run coroutines on a loop in a thread of their own, as the caller's loop may be running: Jupyter's is.

    `attempt` gives an outcome for each position of a unit, `limit` run at a time, `board` is told of each as it ends.
    """
    waiting = iter(units)
    started = threading.Event()
    cancels: list[Callable[[], object]] = []

    async def worker() -> None:
        for unit in waiting:
            begun = time.perf_counter()
            found = await attempt(unit)
            board.put_all(unit, found, time.perf_counter() - begun)

    async def main() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancels.append(partial(loop.call_soon_threadsafe, task.cancel))
        started.set()
        await asyncio.gather(*(worker() for _ in range(limit)))

    def work() -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                asyncio.run(main())
        finally:
            started.set()

    def cancel() -> None:
        started.wait(FAREWELL_S)
        with contextlib.suppress(RuntimeError, IndexError):  # it ended by itself meanwhile
            cancels[0]()

    run_threads(work, 1, "rewards", board, cancel)


async def _attempted_async(
    fn: Callable[..., Any], rollouts: Sequence[Rollout], many: bool, timeout_s: float | None, unit: Sequence[int]
) -> list[Outcome]:
    mine = [rollouts[i] for i in unit]
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            value = await (fn(mine) if many else fn(mine[0]))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # it is us who are cancelled, not what the reward waited for
            raise
        return [Failure.of(error)] * len(mine)
    except (Exception, SystemExit) as error:
        if clock.expired():
            return [Failure(f"the reward took longer than {timeout_s:g} s")] * len(mine)
        return [Failure.of(error)] * len(mine)
    return outcomes(value, len(mine), many)


def _plain_outcomes(fn: Callable[..., Any], many: bool, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """What a process of its own does with completions: the answer is made of JSON's types."""
    return [
        outcome.plain()
        if isinstance(outcome, Failure)
        else {"reward": outcome.value, "components": dict(outcome.components)}
        for outcome in attempted(fn, rollouts, many)
    ]


def _outcome_of(plain: dict[str, Any]) -> Outcome:
    return Failure.from_plain(plain) if "said" in plain else Reward(plain["reward"], plain["components"])
