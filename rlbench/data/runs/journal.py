"""The calls of an endpoint as a file: one JSON object a line, written when a call is over, each token once.

    {"call": 7, "run": "a", "time": 1.7e9, "model": "tiny", "parent": [4, 0] or null,
     "prompt": [ids behind the parent's], "request": {"messages": […], "tools": […], …}, "sampling": {…},
     "differs": {"at": 100, "sampled": "…", "given": "…"} or null,
     "choices": [{"ids": […], "logprobs": […], "versions": [[begin, version], …], "finish": "stop"}]}

`parent`: the call, and which of its choices, that this one continues; of the `messages`, only those behind its own. A
request whose messages have images, as data URLs, has the digests of all of them as `images`, and the prompt's tokens
where they begin as `image_places`; of sounds, in parts `input_audio`, likewise `sounds` and `sound_places`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, eq=False)
class Choice:
    """What was sampled: token ids, their log-probs, and [first token, weight version] of each span of them."""

    ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    finish: str


@dataclass(frozen=True, eq=False)
class Call:
    """One request to the endpoint. `server`: which replica served it; `prompt`: all token ids it was sampled behind,
    of which the first `ahead` are its parent's, sampled ones included.

    `differs`: where the client's text of earlier turns encodes otherwise than what was sampled, which was kept.
    """

    server: str
    number: int
    run: str
    time: float
    model: str
    parent: tuple[int, int] | None
    ahead: int
    prompt: list[int]
    request: Mapping[str, Any]
    sampling: Mapping[str, Any]
    differs: Mapping[str, Any] | None
    choices: list[Choice]

    @property
    def key(self) -> tuple[str, int]:
        """What no other call of the session has."""
        return self.server, self.number

    @property
    def media(self) -> tuple[str, ...]:
        """Digests of the images, or the sounds, in its messages and those before them."""
        return tuple(self.request.get("images") or self.request.get("sounds") or ())

    @property
    def tokens(self) -> int:
        """How many tokens were sampled."""
        return sum(len(choice.ids) for choice in self.choices)

    def whole(self, choice: int) -> list[int]:
        """Return the token ids of the prompt and of a choice behind it."""
        return [*self.prompt, *self.choices[choice].ids]


def line_of(call: Call) -> str:
    """Return the line of a call."""
    value = {
        "call": call.number,
        "run": call.run,
        "time": call.time,
        "model": call.model,
        "parent": call.parent,
        "prompt": call.prompt[call.ahead :],
        "request": call.request,
        "sampling": dict(call.sampling),
        "differs": call.differs,
        "choices": [vars(choice) for choice in call.choices],
    }
    return json.dumps(value, separators=(",", ":")) + "\n"


def read(path: Path, begin: int = 0) -> Iterator[Call]:
    """Read the calls of a replica, oldest first; a last line that is cut (its writer was killed) is left out.

    `begin`: bytes to skip, and what is left of a line that began in them; a call that continues one of those goes too.
    """
    calls: dict[int, Call] = {}
    with path.open("rb") as file:
        if begin:
            file.seek(begin - 1)
            file.readline()
        for line in file:
            if not line.endswith(b"\n"):
                return
            value = json.loads(line)
            parent = None if value["parent"] is None else (int(value["parent"][0]), int(value["parent"][1]))
            if begin and parent is not None and parent[0] not in calls:
                continue
            before = [] if parent is None else calls[parent[0]].whole(parent[1])
            call = Call(
                server=path.stem,
                number=value["call"],
                run=value["run"],
                time=value["time"],
                model=value["model"],
                parent=parent,
                ahead=len(before),
                prompt=[*before, *value["prompt"]],
                request=value["request"],
                sampling=value["sampling"],
                differs=value["differs"],
                choices=[
                    Choice(one["ids"], one["logprobs"], [(int(a), int(b)) for a, b in one["versions"]], one["finish"])
                    for one in value["choices"]
                ],
            )
            calls[call.number] = call
            yield call
