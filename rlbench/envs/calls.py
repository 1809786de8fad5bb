"""Environments' calls beside the thread that generates: plain functions on threads, awaitables on one event loop.

Nothing here waits for a call: whoever generates asks now and then what is finished. A call that takes too long, or is
still running when nobody wants it any more, is given up: its thread cannot be cut, so it ends by itself, is never
waited for, and does not count towards the limit.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlbench.envs.protocol import awaited

THREADS = 32
"""Plain calls that run at the same time; further ones wait."""
CLOSE_S = 5.0
"""For what still runs on the event loop when the generation is over: it is cancelled, and may close its environment."""


@dataclass(eq=False)
class Call:
    """One call. `value` or `error` once it is `done`; `seconds` it took."""

    key: Any
    fn: Callable[[], Any]
    late: Callable[[], Any] | None = None
    value: Any = None
    error: BaseException | None = None
    started: float | None = None
    seconds: float = 0.0
    given_up: bool = field(default=False, repr=False)


class EnvCalls:
    """The calls of one generation; each may take `timeout_s` seconds from its start, None: for ever."""

    def __init__(self, timeout_s: float | None = None, threads: int = THREADS) -> None:
        self._timeout_s = timeout_s
        self._threads = threads
        self._changed = threading.Condition()
        self._queue: deque[Call] = deque()
        self._running: set[Call] = set()
        self._on_thread: set[Call] = set()
        self._done: deque[Call] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, key: Any, fn: Callable[[], Any], late: Callable[[], Any] | None = None) -> None:
        """Run `fn`, and what it returns if that can be awaited. `late`: called behind it where it was given up."""
        call = Call(key, fn, late)
        with self._changed:
            self._queue.append(call)
            self._fill()

    def finished(self, wait_s: float = 0.0) -> list[Call]:
        """Calls that are over since the last time; waits up to `wait_s` seconds for one."""
        with self._changed:
            self._expire()
            if not self._done and wait_s > 0:
                self._changed.wait(wait_s)
                self._expire()
            over = list(self._done)
            self._done.clear()
            return over

    @property
    def pending(self) -> int:
        """Calls that were started and not yet handed out by `finished`."""
        with self._changed:
            return len(self._queue) + len(self._running) + len(self._done)

    def give_up(self, keep: Callable[[Any], bool]) -> list[Any]:
        """Forget the calls whose key `keep` does not hold; return the keys of those that run.

        Their `late` is called as they end. Those that did not start yet are for the caller to close.
        """
        with self._changed:
            waiting = [c for c in self._queue if not keep(c.key)]
            for call in waiting:
                self._queue.remove(call)
            running = [c for c in self._running if not keep(c.key)]
            for call in running:
                call.given_up = True
                self._leave(call)
            self._fill()
            return [call.key for call in running]

    def close(self) -> None:
        """End the event loop; threads of calls that were given up end by themselves."""
        with self._changed:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    # --- with the lock held --------------------------------------------------------------

    def _fill(self) -> None:
        while self._queue and len(self._on_thread) < self._threads:
            call = self._queue.popleft()
            call.started = time.monotonic()
            self._running.add(call)
            self._on_thread.add(call)
            threading.Thread(target=self._run, args=(call,), daemon=True, name="environment").start()

    def _expire(self) -> None:
        if self._timeout_s is None:
            return
        now = time.monotonic()
        for call in [c for c in self._running if now - (c.started or now) > self._timeout_s]:
            call.error = TimeoutError(f"no answer within env_timeout_s={self._timeout_s:g}")
            call.seconds, call.given_up = now - (call.started or now), True
            self._leave(call)
            self._done.append(call)
        self._fill()

    def _leave(self, call: Call) -> None:
        self._running.discard(call)
        self._on_thread.discard(call)

    # --- on other threads ----------------------------------------------------------------

    def _run(self, call: Call) -> None:
        value, error = None, None
        try:
            value = call.fn()
        except BaseException as raised:
            error = raised
        if error is None and inspect.isawaitable(value):
            self._await(call, value)
        elif self._end(call, value, error) and call.late is not None:
            _close_late(call.late)

    def _await(self, call: Call, value: Any) -> None:
        with self._changed:
            self._on_thread.discard(call)
            self._fill()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), daemon=True, name="environments").start()
            loop = self._loop

        async def watched() -> None:
            got, error = None, None
            try:
                got = await value
            except BaseException as raised:
                error = raised
            if self._end(call, got, error) and call.late is not None:
                try:
                    closing = call.late()
                    if inspect.isawaitable(closing):
                        await closing
                except BaseException as raised:
                    _say(raised)

        asyncio.run_coroutine_threadsafe(watched(), loop)

    def _end(self, call: Call, value: Any, error: BaseException | None) -> bool:
        """Note a call's result; True where nobody wants it any more."""
        with self._changed:
            given_up = call.given_up
            if not given_up:
                call.value, call.error = value, error
                call.seconds = time.monotonic() - (call.started or 0.0)
                self._leave(call)
                self._done.append(call)
            self._fill()
            self._changed.notify_all()
        return given_up


def _close_late(late: Callable[[], Any]) -> None:
    """Close an environment that was given up; what that raises has no sample to stand beside, so it is printed."""
    try:
        value = late()
        if inspect.isawaitable(value):
            asyncio.run(awaited(value))
    except BaseException as error:
        _say(error)


def _say(error: BaseException) -> None:
    sys.stdout.write(f"close() of an environment that was given up raised {type(error).__name__}: {error}\n")


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_S))
        loop.close()
