"""Where a rank is: in which session, as what, and its end of it, good for the time of the call that runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rlbench.dispatch import context
from rlbench.dispatch.link import Link
from rlbench.errors import EngineError, Stopped
from rlbench.runtime import cluster, registry
from rlbench.strategies.control import ControlGroup, peer_failed
from rlbench.strategies.inference_side import SESSION

T = TypeVar("T")


GUESTS = "guests"


@dataclass(frozen=True)
class RankPlace:
    """A rank of engine `engine` of session `session`; `GUESTS` in the engine's place: a rank that `torchrun` started,
    which uses the session's replicas and is none of its ranks."""

    session: str
    engine: str
    link: Link

    @classmethod
    def here(cls) -> RankPlace:
        """Of the call that runs: its session is driven under the call's own epoch, so its driver stays the driver.
        Outside of any call: of the session that the environment names.

        Raises:
            EngineError: it names one that does not run.
        """
        call = context.current()
        if not call.worker:
            return cls.of_guest(os.environ[SESSION])
        _, session, engine, _ = call.worker.split("/")
        cluster.join_own_worker(call.cluster)
        return cls(session, engine, Link.operate(session, call.epoch))

    @classmethod
    def of_guest(cls, session: str) -> RankPlace:
        """Of a rank that is a guest of a session; see `here`."""
        if not cluster.is_joined():
            record = registry.read_cluster()
            known = [] if record is None else [one["name"] for one in registry.live_sessions(record.id)]
            if session not in known:
                raise EngineError(
                    f"{SESSION}={session}: no such session runs; there are {', '.join(known) or 'none'}. Make one "
                    f"first, rb.Session(…, name={session!r}), and keep it while the script runs"
                )
        cluster.current()
        place = cls(session, GUESTS, Link.operate(session, 0))
        place.renew()
        return place

    def renew(self) -> None:
        """Drive under the epoch of the call that runs now, a guest under the present one; a driver that came since gave
        out a later one."""
        guest = self.engine == GUESTS
        now = self.link.state("epoch")["epoch"] if guest else context.current().epoch
        self.link.epoch = max(self.link.epoch, int(now))


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
