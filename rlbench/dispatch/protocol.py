"""What travels between a driver and its workers: tickets out, replies back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlbench.traces import UserLine


@dataclass(frozen=True)
class Ticket:
    """One call. (`epoch`, `seq`) is its place in the session's one total order; `world` the ranks it goes to.

    `acknowledged`: the last call whose result the driver has, so that workers may forget it.
    `tracked`: the monitor shows the call as running until the first worker ends it.
    `queue`: name of the worker that hands out the shared work of this call, empty where there is none.
    """

    epoch: int
    seq: int
    call_id: str
    world: int = 1
    acknowledged: str = ""
    queue: str = ""
    queue_total: int = 0
    tracked: bool = False


@dataclass(frozen=True)
class Failure:
    """An exception on a worker. `error` is set for our own errors, which the driver raises as they are; `line` is
    the user's own line that raised, where there is one."""

    kind: str
    message: str
    traceback: str
    error: BaseException | None = None
    line: UserLine | None = None


@dataclass(frozen=True)
class Reply:
    """The end of one call on one worker. `output`: all it printed; `stopped`: cut by an interrupt, `value` partial;
    `issued`: collectives it took part in."""

    value: Any = None
    failure: Failure | None = None
    stopped: bool = False
    output: str = ""
    seconds: float = 0.0
    issued: int = 0


@dataclass(frozen=True)
class Progress:
    """A look at a running call: what it printed since the cursor, the progress it reports, the collectives it is in or
    has done."""

    known: bool
    output: str = ""
    cursor: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    issued: int = 0


def actor_name(session: str, *parts: str | int) -> str:
    """The name of a session's actor, e.g. `rlbench/demo/actor/0`."""
    return "/".join(["rlbench", session, *map(str, parts)])
