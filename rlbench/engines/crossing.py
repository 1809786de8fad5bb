"""A broadcast of weights: training ranks send while replicas apply, two engines' calls in flight at the same time.

Each side waits for the other inside its call. So whichever fails first, the others are told to give up, and what is
raised is the cause, not its echo.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING

from rlbench.dispatch.pending import Pending
from rlbench.errors import Stopped, WeightSyncError
from rlbench.weights.manifest import Manifest

if TYPE_CHECKING:
    from rlbench.engines.inference import InferenceEngine
    from rlbench.engines.train import TrainEngine


class Crossing:
    """`send_weights` on all training ranks and `apply_weights` on every replica; waits and stops like one `Pending`.

    Args:
        train, infer: both sides.
        manifest: as announced, with its channel.
        workers: number of worker processes of each replica.
    """

    def __init__(self, train: TrainEngine, infer: InferenceEngine, manifest: Manifest, workers: list[int]) -> None:
        self._train, self._infer = train, infer
        self._outcome: tuple[None, BaseException | None] | None = None
        self._sending = train.call_all("send_weights", infer.name, manifest, what="weight sync: sending")
        self._applying = []
        try:
            for call in receiving(infer, manifest, workers):
                self._applying.append(call)
        except BaseException as error:
            self._give_up(f"the replicas could not be called: {error}")
            raise

    def stop(self) -> None:
        """Ask the sender to stop; it does as long as it has not begun to send."""
        self._sending.stop()

    def result(self, timeout: float | None = None) -> None:
        """Wait for both sides.

        Raises:
            TimeoutError: not done after `timeout` seconds; it goes on.
            Stopped: stopped before anything was sent; the replicas keep their weights.
            WeightSyncError: a side failed or died; replicas that had begun refuse to generate until a sync succeeds.
        """
        if self._outcome is None:
            self._outcome = None, self._wait(timeout)
        error = self._outcome[1]
        if error is not None:
            raise error.with_traceback(None)

    def _wait(self, timeout: float | None) -> BaseException | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        calls = [self._sending, *self._applying]
        pool = ThreadPoolExecutor(len(calls), thread_name_prefix="rlbench weight sync")
        try:
            futures = [pool.submit(call.result) for call in calls]
            done, waiting = wait(futures, timeout, return_when=FIRST_EXCEPTION)
            failed = [future for future in futures if future in done and future.exception() is not None]
            if failed:
                self._give_up(str(failed[0].exception()))
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                waiting = wait(futures, left).not_done
            if waiting:
                raise TimeoutError(f"weight sync: sending is still running after {timeout:g} s")
        finally:
            pool.shutdown(wait=False)
        return cause_of([future.exception() for future in futures], self._infer)

    def _give_up(self, reason: str) -> None:
        """Tell the sender, and through it all members; to a dead sender there is nothing to tell."""
        for actor in self._train._actors:
            actor.control.remote("give_up_sync", self._infer.name, reason)


def receiving(infer: InferenceEngine, manifest: Manifest, workers: list[int]) -> Iterator[Pending]:
    """Submit `apply_weights` to one replica after the other, each a call of its own: the death of one must be seen
    while the others still wait."""
    assert manifest.channel is not None
    first = 1
    for actor, label, count in zip(infer._actors, infer.labels, workers, strict=True):
        own = replace(manifest, channel=replace(manifest.channel, first_rank=first))
        first += count
        yield infer.link.submit(
            infer.name,
            [label],
            [actor],
            "apply_weights",
            [((own,), {})],
            list,
            "weight sync: applying",
            collective=False,
        )


def cause_of(ended: Sequence[BaseException | None], infer: InferenceEngine) -> BaseException | None:
    """The error to show: what went wrong first hand, not what others gave up for. None where nothing did."""
    errors = [error for error in ended if error is not None]
    if not errors:
        return None
    first_hand = [error for error in errors if not getattr(error, "secondary", False)] or errors
    cause = first_hand[0]
    if isinstance(cause, Stopped):
        return cause
    shown = WeightSyncError(
        f"the weights did not reach all replicas: {cause}\n  A replica that had begun to take them refuses to "
        f"generate until a sync succeeds: sync again (a dead worker's engine must be built again first), or call "
        f"{infer.name}.reload()"
    )
    shown.__cause__ = cause
    return shown
