"""What travels between a driver and its workers: tickets out, replies back.

Ray hands bytes over as they are, and takes 15 to 30 µs for each argument that is anything else, more for one that it
pickles. So a ticket travels as bytes, with those arguments in it that are plain values, and so does a reply of one.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from rlbench.traces import UserLine

PLAIN = (type(None), bool, int, float)
MOST_CHARACTERS, MOST_ITEMS, DEPTH = 4096, 16, 3
"""Of a plain value: what is longer, or deeper, is left to Ray."""


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

    def sent(
        self, verb: str, args: Iterable[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[bytes, list[Any]]:
        """Return a call of `verb` with this ticket as it travels, and the arguments that travel beside it."""
        positional = list(args)
        values = [*positional, *kwargs.values()]
        plain = {i: value for i, value in enumerate(values) if is_plain(value)}
        call = (*vars(self).values(), verb, plain, len(positional), *kwargs)
        return pickle.dumps(call), [value for i, value in enumerate(values) if i not in plain]

    @staticmethod
    def received(sent: bytes, beside: Iterable[Any] = ()) -> tuple[Ticket, str, list[Any], dict[str, Any]]:
        """Return ticket, verb, positional and keyword arguments of what `sent` gave."""
        call = pickle.loads(sent)
        verb, plain, positional, *keywords = call[TICKET_FIELDS:]
        left = iter(beside)
        values = [plain[i] if i in plain else next(left) for i in range(positional + len(keywords))]
        kwargs = dict(zip(keywords, values[positional:], strict=True))
        return Ticket(*call[:TICKET_FIELDS]), verb, values[:positional], kwargs


TICKET_FIELDS = len(fields(Ticket))


def is_plain(value: Any, depth: int = DEPTH) -> bool:
    """Whether a value is small and made of numbers, texts, tuples, lists and dicts alone, and not of their kin."""
    kind = type(value)
    if kind is str:
        return len(value) <= MOST_CHARACTERS
    if kind not in (tuple, list, dict):
        return kind in PLAIN
    if len(value) > MOST_ITEMS or not depth:
        return False
    parts = (*value, *value.values()) if kind is dict else value
    return all(is_plain(part, depth - 1) for part in parts)


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

    def sent(self) -> Reply | bytes:
        """Return the reply as it travels."""
        said = (self.value, None, self.stopped, self.output, self.issued)
        return pickle.dumps(said) if self.failure is None and is_plain(said) else self

    @staticmethod
    def received(sent: Reply | bytes) -> Reply:
        """Return the reply of what `sent` gave."""
        return Reply(*pickle.loads(sent)) if isinstance(sent, bytes) else sent


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
