"""The one event loop of this process on which environments' own async code runs, so that clients, sessions and locks
that it opens stay usable from one call to the next."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from typing import Any

from rlbench.user_code import user_code

_starting = threading.Lock()


def process_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, which runs on a thread of its own; samples ask for it at the same time."""
    with _starting:
        return _started()


def on_loop(value: Any) -> Any:
    """Return a value, or what it gives where it can be awaited: on the process's loop, called from another thread."""

    async def awaited() -> Any:
        with user_code():  # a SystemExit would end the loop, for everybody
            return await value

    return asyncio.run_coroutine_threadsafe(awaited(), process_loop()).result() if inspect.isawaitable(value) else value


@functools.cache
def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="environments' loop").start()
    return loop
