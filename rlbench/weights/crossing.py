"""A broadcast of weights and its two sides: what each replica is told, and who is told of whose failure."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from rlbench.errors import Stopped, WeightSyncError
from rlbench.weights.manifest import Manifest


def per_replica(manifest: Manifest, workers: Iterable[int]) -> list[Manifest]:
    """Return the manifest of a broadcast as each replica reads it: its workers have ranks of their own in the group."""
    assert manifest.channel is not None
    *firsts, _ = itertools.accumulate(workers, initial=1)
    return [replace(manifest, channel=replace(manifest.channel, first_rank=first)) for first in firsts]


def send_while_applying(
    send: Callable[[], Any], applying: Sequence[Any], give_up: Callable[[str], None], to: str
) -> BaseException | None:
    """Run `send` while the replicas apply; return the error to show: what went wrong first hand, if anything did.

    Whichever fails first, the others are told to give up: `applying` holds a call for each replica, as one may die.
    """
    first = threading.Lock()

    def released(error: BaseException | None) -> None:
        if error is not None and first.acquire(blocking=False):  # an echo might reach the group of the next sync
            give_up(str(error))

    with ThreadPoolExecutor(max(1, len(applying)), thread_name_prefix="rlbench weight sync") as pool:
        futures = [pool.submit(call.result) for call in applying]
        for future in futures:
            future.add_done_callback(lambda ended: released(ended.exception()))
        ended: list[BaseException | None] = []
        try:
            send()
        except (Exception, Stopped) as error:  # a hook of the user's too
            released(error)
            ended.append(error)
        ended += [future.exception() for future in futures]
    errors = [error for error in ended if error is not None]
    if not errors:
        return None
    cause = next((error for error in errors if not getattr(error, "secondary", False)), errors[0])
    if isinstance(cause, Stopped):
        return cause
    shown = WeightSyncError(
        f"the weights did not reach all replicas: {cause}\n  A replica that had begun to take them refuses to "
        f"generate until a sync succeeds: sync again (a dead worker's engine must be built again first), or call "
        f"{to}.reload()"
    )
    shown.__cause__ = cause
    return shown
