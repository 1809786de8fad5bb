"""What travels between a driver and its workers: tickets out, replies back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlbench.traces import UserLine


@dataclass(frozen=True)
class Ticket:
    """One call. (`epoch`, `seq`) is its place in the session's total order; `world` the ranks it goes to; `queue` the
    worker that hands out its shared work; `tracked` calls the monitor shows as running."""

    epoch: int
    seq: int
    call_id: str
    world: int = 1
    queue: str = ""
    queue_total: int = 0
    tracked: bool = False


@dataclass(frozen=True)
class Failure:
    """An exception on a worker: `error` one of ours, raised as it is; `line` the user's own that raised."""

    kind: str
    message: str
    traceback: str
    error: BaseException | None = None
    line: UserLine | None = None


@dataclass(frozen=True)
class Reply:
    """The end of one call on one worker; `stopped`: cut, `value` partial; `issued`: collectives it took part in."""

    value: Any = None
    failure: Failure | None = None
    stopped: bool = False
    output: str = ""
    issued: int = 0


@dataclass(frozen=True)
class Progress:
    """What a running call printed since the cursor, the progress it reports, the collectives it has issued."""

    output: str = ""
    cursor: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    issued: int = 0


def actor_name(session: str, *parts: str | int) -> str:
    """Return the name of a session's actor, e.g. `rlbench/demo/actor/0`."""
    return "/".join(["rlbench", session, *map(str, parts)])
