"""The view model: what a session shows, as `GET /state` serves it under `view`. Dashboard and side panel draw it.

The side panel's types (extension/src/schema.ts) are made from these classes by scripts/panel_schema.py.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypedDict

Text = str | int | list[Any]
"""Data that is shown as it is, or a template that a catalogue can translate, and its arguments, texts themselves:
`["%1 of %2", …]`; `[[one, many], count, …]` where the count decides."""

Condition = Literal["lost", "paused", "running", "idle"]


class Phase(TypedDict):
    """What runs: `what`, then how far it is; `fraction` 0 to 1 where known, `left` the time that is left."""

    what: list[Text]
    busy: bool
    fraction: float | None
    left: Text


class Control(TypedDict):
    """One control: the verb of `POST /command`, and what it will do, or why it cannot.

    `label` stands on it, `name` is read aloud, `command` names it while it is under way. `key` is stable. `drives`: it
    needs a session in which nothing runs. `pressed`: of a toggle.
    """

    key: str
    verb: str
    args: dict[str, Any]
    label: Text
    name: Text
    command: Text
    title: Text
    enabled: bool
    drives: bool
    pressed: bool | None


class Part(TypedDict):
    """A part of an engine that can be offloaded, where it is, and the toggle that moves it."""

    name: str
    shown: Text
    sign: str
    word: Text
    resident: bool
    toggle: Control


class EngineView(TypedDict):
    """One engine; `note` is a warning where `warns`, else its version. `toggle` moves all its parts.

    `bytes`: resident in host memory, all workers.
    """

    name: str
    kind: str
    parts: list[Part]
    toggle: Control | None
    bytes: int | None
    note: Text
    warns: bool


class Failure(TypedDict):
    """The last error in one line; `time` in Unix seconds, None where not known."""

    time: float | None
    text: str


class SessionView(TypedDict):
    """How a session is, what runs, its engines and what can be done."""

    condition: Condition
    status: Text
    facts: list[Text]
    phase: Phase
    engines: list[EngineView]
    controls: list[Control]
    failure: Failure | None


def text(template: str, *args: Text) -> Text:
    """A text that a catalogue can translate."""
    return [template, *args]


def plural(one: str, many: str, count: int, *args: Text) -> Text:
    """A text that depends on `count`, its first argument."""
    return [[one, many], count, *args]


def english(said: Text) -> str:
    """The text for a reader of English."""
    if not isinstance(said, list):
        return str(said)
    template, *args = said
    if isinstance(template, list):
        template = template[0 if args[0] == 1 else 1]
    return re.sub(r"%(\d)", lambda place: english(args[int(place[1]) - 1]), template)
