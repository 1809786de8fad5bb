"""What travels between a driver and its workers: tickets out, replies back.

Ray packs numbers, texts and lists of them by msgpack, all else by pickle at some 40 µs an object on each side. So a
ticket travels as a list, and a reply that says nothing but its count as that count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from rlbench.traces import UserLine

Sent = list[Any]
"""A ticket as it travels: its fields, the verb, the names of the call's keywords."""


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

    def sent(self, verb: str, keywords: Iterable[str] = ()) -> Sent:
        """Return the ticket of a call of `verb`, the last of whose values have these names, as it travels."""
        return [*vars(self).values(), verb, *keywords]

    @staticmethod
    def received(sent: Sent) -> tuple[Ticket, str, list[str]]:
        """Return ticket, verb and keywords of what `sent` gave."""
        return Ticket(*sent[:TICKET_FIELDS]), sent[TICKET_FIELDS], sent[TICKET_FIELDS + 1 :]


TICKET_FIELDS = len(fields(Ticket))


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

    def sent(self) -> Reply | int:
        """Return the reply as it travels."""
        empty = self.value is None and self.failure is None and not self.stopped and not self.output
        return self.issued if empty else self

    @staticmethod
    def received(sent: Reply | int) -> Reply:
        """Return the reply of what `sent` gave."""
        return Reply(issued=sent) if isinstance(sent, int) else sent


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
