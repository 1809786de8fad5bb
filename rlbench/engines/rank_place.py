"""Where a rank is: in which session, as what, and its end of it, good for the time of the call that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rlbench.dispatch import context
from rlbench.dispatch.link import Link
from rlbench.errors import Stopped
from rlbench.runtime import cluster
from rlbench.strategies.control import ControlGroup, peer_failed

T = TypeVar("T")


@dataclass(frozen=True)
class RankPlace:
    """A rank of engine `engine` of session `session`."""

    session: str
    engine: str
    link: Link

    @classmethod
    def here(cls) -> RankPlace:
        """Of the call that runs: its session is driven under the call's own epoch, so its driver stays the driver."""
        call = context.current()
        _, session, engine, _ = call.worker.split("/")
        cluster.join_own_worker(call.cluster)
        return cls(session, engine, Link.operate(session, call.epoch))

    def renew(self) -> None:
        """Drive under the epoch of the call that runs now; a driver that came since gave out a later one."""
        self.link.epoch = max(self.link.epoch, context.current().epoch)


def stop_requested() -> bool:
    """Whether somebody asked the call that runs now to stop."""
    return context.current().stop_requested()


def led(control: ControlGroup, doing: str, work: Callable[[], T]) -> T:
    """Do `work`, which holds no collective, on rank 0; what it returns (a plain value) all ranks return. Collective.

    Raises:
        Whatever `work` raised on rank 0; `Stopped` on all where it was that; EngineError on the others.
    """
    found: T | None = None
    failure: Exception | Stopped | None = None
    if control.rank == 0:
        try:
            found = work()
        except (Exception, Stopped) as error:  # whatever it is, the peers must hear of it
            failure = error
    told: tuple[Any, str, bool] = control.gather((found, _told(failure), isinstance(failure, Stopped)))[0]
    if failure is not None:
        raise failure
    return_value, failed, stopped = told
    if stopped:
        raise Stopped(failed)
    if failed:
        raise peer_failed(f"{doing} failed on rank 0 ({failed}); this rank stopped with it and stays usable.")
    result: T = return_value
    return result


def _told(failure: BaseException | None) -> str:
    if failure is None:
        return ""
    return str(failure) if isinstance(failure, Stopped) else f"{type(failure).__name__}: {failure}"
