"""Several replicas behind one address: which of them serves a call, wherever it arrives, and how it gets there.

A named run is served by one replica, told by its name. A conversation without a name stays with the replica that has
its beginning in its cache and remembers it; a new one, and one whose replica does not answer, goes where the fewest
calls are open.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from rlbench.envs.policy import UNKEPT
from rlbench.workers.replica.serving.options import replica_of
from rlbench.workers.replica.serving.refusal import Refusal

HOP_HEADER = "X-Rlbench-Hop"
"""Of a call that a replica handed on: it is served where it arrives."""
HANDED_ON = ("authorization", "x-api-key", "content-type", "accept", "x-rlbench-run", "anthropic-version")
REMEMBERED, REMEMBERED_CHARACTERS = 4096, 32 << 20
"""Beginnings of conversations that name no run, and of how many characters together, that later calls may extend."""


class Unanswered(Refusal):
    """A replica that a call was to be handed on to does not answer, and nothing was sent to the client."""


class Balancer:
    """Says for a replica, number `own` of those at `urls`, who serves a call that arrives at it, and hands it on."""

    def __init__(self, own: int, urls: Sequence[str]) -> None:
        self.own, self._urls = own, tuple(urls)
        self._open, self._served = [0] * len(urls), [0] * len(urls)
        self._left_out: set[int] = set()
        self._known: collections.OrderedDict[str, int] = collections.OrderedDict()  # by beginning, the newest last
        self._characters = 0

    async def answer(
        self,
        run: str,
        asked: Mapping[str, Any],
        scope: Any,
        body: bytes,
        receive: Any,
        send: Any,
        serve: Callable[[], Awaitable[None]],
    ) -> None:
        """Have a call of a run ("" where it names none) answered, by `serve` here or by another replica. One that does
        not answer gets no calls without a run any more, until the endpoint is opened again; Unanswered for a run's."""
        handed_on = HOP_HEADER.lower().encode() in dict(scope["headers"])
        while (owner := self.owner(run, asked, handed_on)) != self.own:
            try:
                with self.serving(owner):
                    await self.hand_on(owner, scope, body, receive, send)
                return
            except Unanswered:
                if run:
                    raise
                self._left_out.add(owner)
        with self.serving(owner):
            await serve()

    def owner(self, run: str, asked: Mapping[str, Any], handed_on: bool) -> int:
        """Return who serves a call of a run ("" where it names none)."""
        if handed_on or run == UNKEPT:
            return self.own
        if run:
            return replica_of(run, len(self._urls))
        text = beginning(asked)
        if not text:  # a question about models, or what will be refused
            return self.own
        there = set(range(len(self._urls))) - self._left_out
        known = max((one for one in self._known if text.startswith(one)), key=len, default=None)
        chosen = None if known is None else self._known[known]
        if chosen not in there:
            chosen = min(there, key=lambda i: (self._open[i], self._served[i]))
        self._remember(text, chosen)
        return chosen

    @contextlib.contextmanager
    def serving(self, owner: int) -> Iterator[None]:
        """Count a call as open at a replica."""
        self._open[owner] += 1
        self._served[owner] += 1
        try:
            yield
        finally:
            self._open[owner] -= 1

    async def hand_on(self, owner: int, scope: Any, body: bytes, receive: Any, send: Any) -> None:
        """Let another replica answer; a client that goes away takes its request along. Unanswered where it does not."""
        gone = asyncio.create_task(_disconnected(receive))
        answering = asyncio.create_task(self._answered(owner, scope, body, send))
        try:
            await asyncio.wait((gone, answering), return_when=asyncio.FIRST_COMPLETED)
        finally:  # also where the server ends
            for task in (gone, answering):
                task.cancel()
        await asyncio.wait((gone, answering))
        if not answering.cancelled() and (error := answering.exception()) is not None:
            raise error

    async def _answered(self, owner: int, scope: Any, body: bytes, send: Any) -> None:
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        headers = {name: given[name] for name in HANDED_ON if name in given} | {HOP_HEADER: "1"}
        begun = False
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False) as session,
                session.post(f"{self._urls[owner]}{scope['path']}", data=body, headers=headers) as answer,
            ):
                kind = answer.headers.get("Content-Type", "application/json").encode("latin-1")
                begun = True
                await send(
                    {"type": "http.response.start", "status": answer.status, "headers": [(b"content-type", kind)]}
                )
                async for part in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except aiohttp.ClientError as error:
            if begun:
                raise
            said = (
                f"replica {owner}, which serves this call, does not answer: {error}; session.endpoint() opens it again"
            )
            raise Unanswered(503, "ServiceUnavailableError", said) from error

    def _remember(self, text: str, owner: int) -> None:
        if text in self._known:
            self._known.move_to_end(text)
            self._known[text] = owner
            return
        self._known[text] = owner
        self._characters += len(text)
        while len(self._known) > REMEMBERED or self._characters > REMEMBERED_CHARACTERS:
            old, _ = self._known.popitem(last=False)
            self._characters -= len(old)


def beginning(asked: Mapping[str, Any]) -> str:
    """Return what a request asks with as one text, up to white space: one that goes on from another begins with its."""
    messages = asked.get("messages")
    if isinstance(messages, list):
        parts = [{"role": "system", "content": asked["system"]}, *messages] if asked.get("system") else messages
        return "".join(f"{_squeezed(_role(one))}\0{_squeezed(_content(one))}\0" for one in parts)
    prompt = asked.get("prompt")
    return _squeezed(prompt) if isinstance(prompt, str) else "" if prompt is None else json.dumps(prompt)[:-1]


def _role(message: Any) -> str:
    return str(message.get("role")) if isinstance(message, dict) else ""


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else message
    return content if isinstance(content, str) else json.dumps(content, sort_keys=True)


def _squeezed(text: str) -> str:
    return "".join(text.split())


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
