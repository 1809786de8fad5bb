"""What the endpoint remembers of each run, so that a call which continues an earlier one is sampled behind the very
tokens of that one, whatever the client made of their text."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbench.data.runs.journal import Call
from rlbench.envs.bridge import common

KEPT_RUNS = 4096
"""Runs that later calls can continue; one of an older run stands by itself."""
SHOWN = 40


@dataclass(frozen=True)
class Joined:
    """The token ids to sample behind. `parent`: call and choice that they continue, `ahead` tokens, `messages` messages
    long; `differs`: where the client's text encodes otherwise."""

    ids: list[int]
    run: str
    parent: tuple[int, int] | None = None
    ahead: int = 0
    messages: int = 0
    differs: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class _Node:
    """What a call and one of its choices leave to be continued: token ids, their text without white space, and digests
    of the images, or sounds, among them."""

    call: int
    choice: int
    ids: list[int]
    squeezed: str
    messages: int
    media: tuple[str, ...]


@dataclass(eq=False)
class Runs:
    """The runs that calls may continue, the one used last at the end; `tokenizer` is of the model. `unnamed`: how names
    of conversations begin that have none, no client's does so."""

    tokenizer: Any
    unnamed: str = "~"
    _nodes: collections.OrderedDict[str, list[_Node]] = field(default_factory=collections.OrderedDict)
    _unnamed: int = 0

    def joined(self, run: str, ids: Sequence[int], media: tuple[str, ...] = ()) -> Joined:
        """Find what a prompt continues: the longest of the run's calls whose text, up to white space, and images or
        sounds it begins with.

        A client that names no run (`""`) continues any conversation of such clients, or begins one of its own.
        """
        runs = [run] if run else [name for name in self._nodes if name.startswith("~")]
        nodes = [(name, node) for name in runs for node in self._nodes.get(name, ())]
        text = _text(self.tokenizer, ids) if nodes else ""
        squeezed = _squeezed(text)
        fitting = [
            (name, node)
            for name, node in nodes
            if squeezed.startswith(node.squeezed) and media[: len(node.media)] == node.media
        ]
        if not fitting:
            return Joined(list(ids), run or self._new())
        name, node = max(fitting, key=lambda one: (len(one[1].ids), one[1].call))
        if list(ids[: len(node.ids)]) == node.ids:
            whole, differs = list(ids), None
        else:
            whole = [*node.ids, *self._tail(text, ids, node)]
            at = common(whole, ids)
            differs = {
                "at": at,
                "sampled": _text(self.tokenizer, whole[at:])[:SHOWN],
                "given": _text(self.tokenizer, ids[at:])[:SHOWN],
            }
        return Joined(whole, name, (node.call, node.choice), len(node.ids), node.messages, differs)

    def add(self, call: Call, messages: int) -> None:
        """Remember a call that is over; `messages`: how many its request had, whole."""
        nodes = self._nodes.setdefault(call.run, [])
        for number, choice in enumerate(call.choices):
            if choice.ids:
                ids = call.whole(number)
                text, media = _squeezed(_text(self.tokenizer, ids)), call.media
                nodes.append(_Node(call.number, number, ids, text, messages, media))
        self._nodes.move_to_end(call.run)
        if call.run.startswith(self.unnamed):
            self._unnamed = max(self._unnamed, int(call.run.removeprefix(self.unnamed)))
        while len(self._nodes) > KEPT_RUNS:
            self._nodes.popitem(last=False)

    def _new(self) -> str:
        self._unnamed += 1
        return f"{self.unnamed}{self._unnamed}"

    def _tail(self, text: str, ids: Sequence[int], node: _Node) -> list[int]:
        """Return the token ids of what stands in a prompt's text behind a node's: those of the client where a token
        begins there."""
        own = _text(self.tokenizer, node.ids)
        space = own[len(own.rstrip()) :]
        rest = text[_place(text, len(node.squeezed)) :]
        rest = rest[common(space, rest) :]
        encoded = [int(token) for token in self.tokenizer(rest, add_special_tokens=False)["input_ids"]]
        for length in range(len(encoded) + 2, max(len(encoded) - 3, 0), -1):
            if length <= len(ids) and _text(self.tokenizer, ids[-length:]) == rest:
                return list(ids[-length:])
        return encoded


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _place(text: str, letters: int) -> int:
    """Return the index behind the first `letters` characters that are no white space."""
    for index, letter in enumerate(text):
        if letters == 0:
            return index
        letters -= not letter.isspace()
    return len(text)
