"""Environments' calls beside the thread that generates: plain functions on threads, awaitables on one event loop.

A call that takes too long, or that nobody wants any more, is given up: its thread cannot be cut, so it ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rlbench.envs.protocol import resolved

THREADS = 32  # plain calls that run at the same time
CLOSE_S = 5.0  # for what still runs on the event loop in the end: it is cancelled, and may close its environment


@dataclass(eq=False)
class EnvCall:
    """One call; `value` or `error` once it is over."""

    key: Any
    fn: Callable[[], Any]
    late: Callable[[], Any]
    value: Any = None
    error: BaseException | None = None
    started: float = 0.0
    given_up: bool = False


class EnvCalls:
    """The calls of one generation; each may take `timeout_s` seconds from its start, None: for ever. `option`: what the
    user calls that."""

    def __init__(self, timeout_s: float | None = None, threads: int = THREADS, option: str = "env_timeout_s") -> None:
        self._timeout_s, self._threads, self._option = timeout_s, threads, option
        self._changed = threading.Condition()
        self._queue: deque[EnvCall] = deque()
        self._running: set[EnvCall] = set()
        self._on_thread: set[EnvCall] = set()
        self._done: deque[EnvCall] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, key: Any, fn: Callable[[], Any], late: Callable[[], Any] = lambda: None) -> None:
        """Run `fn`, and what it returns if that can be awaited. `late`: called behind it where it was given up."""
        with self._changed:
            self._queue.append(EnvCall(key, fn, late))
            self._fill()

    def finished(self, wait_s: float = 0.0) -> list[EnvCall]:
        """Return the calls that are over since the last time; wait up to `wait_s` seconds for one."""
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
        """Calls that `finished` has not handed out yet."""
        with self._changed:
            return len(self._queue) + len(self._running) + len(self._done)

    def give_up(self, keep: Callable[[Any], bool]) -> list[Any]:
        """Forget the calls whose key `keep` does not hold; return the keys of those that run: `late` will follow."""
        with self._changed:
            self._queue = deque(call for call in self._queue if keep(call.key))
            running = [call for call in self._running if not keep(call.key)]
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
        for call in [call for call in self._running if now - call.started > self._timeout_s]:
            call.error = TimeoutError(f"no answer within {self._option}={self._timeout_s:g}")
            call.given_up = True
            self._leave(call)
            self._done.append(call)
        self._fill()

    def _leave(self, call: EnvCall) -> None:
        self._running.discard(call)
        self._on_thread.discard(call)

    def _run(self, call: EnvCall) -> None:
        value, error = None, None
        try:
            value = call.fn()
        except BaseException as raised:
            error = raised
        if inspect.isawaitable(value):
            self._await(call, value)
        elif self._end(call, value, error):
            with _printed():
                resolved(call.late())

    def _await(self, call: EnvCall, value: Any) -> None:
        with self._changed:
            self._on_thread.discard(call)
            self._fill()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), daemon=True, name="environments").start()
            loop = self._loop

        async def watched() -> None:
            result, error = None, None
            try:
                result = await value
            except BaseException as raised:
                error = raised
            if self._end(call, result, error):
                with _printed():
                    closing = call.late()
                    if inspect.isawaitable(closing):
                        await closing

        asyncio.run_coroutine_threadsafe(watched(), loop)

    def _end(self, call: EnvCall, value: Any, error: BaseException | None) -> bool:
        """Note a call's result; True where nobody wants it any more."""
        with self._changed:
            if not call.given_up:
                call.value, call.error = value, error
                self._leave(call)
                self._done.append(call)
            self._fill()
            self._changed.notify_all()
        return call.given_up


@contextlib.contextmanager
def _printed() -> Iterator[None]:
    """Print what closing an environment raises that was given up: it has no sample to stand beside."""
    try:
        yield
    except BaseException as error:
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
