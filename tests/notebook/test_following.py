"""A card whose numbers change is drawn anew where it stands, until what it tells of is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from rlbench.errors import SessionError
from rlbench.notebook.cards import following
from rlbench.notebook.cards.card import Card
from rlbench.notebook.cards.following import FollowedCard, endpoint_view
from tests.clock import until


class Counted:
    """What is told of; each display and update that a notebook is sent."""

    def __init__(self) -> None:
        self.open, self.over, self.gone, self.looks = 0, False, False, 0
        self.sent: list[tuple[str, bool, str]] = []  # which output, whether it was updated, its text

    def card(self) -> Card:
        self.looks += 1
        if self.gone:
            raise SessionError("session 'a' has ended\nand more")
        return Card("Endpoint", [f"{self.open} open"])

    def publish(self, data: Any, metadata: Any = None, *, transient: Any, update: bool = False, **_: Any) -> None:
        self.sent.append((transient["display_id"], update, data["text/plain"]))

    def follow(self) -> FollowedCard:
        return FollowedCard("it", lambda: (self.card(), self.over))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    made, shell = Counted(), InteractiveShell.instance()
    monkeypatch.setattr(shell.display_pub, "publish", made.publish)
    monkeypatch.setattr(following, "LOOK_S", 0.01)
    monkeypatch.setattr(following, "_followed", {})
    yield made
    made.over = True
    until(lambda: not followers())


def followers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rlbench it")]


def test_it_is_drawn_anew_only_where_it_changes(counted: Counted) -> None:
    counted.follow()._ipython_display_()
    until(lambda: counted.looks > 5)
    ((output, updated, text),) = counted.sent
    assert not updated and "0 open" in text
    counted.open = 3
    until(lambda: len(counted.sent) == 2)
    assert counted.sent[1][:2] == (output, True) and "3 open" in counted.sent[1][2]


def test_shown_again_it_is_followed_there_alone(counted: Counted) -> None:
    for _ in range(3):
        counted.follow()._ipython_display_()
    until(lambda: len(followers()) == 1)
    counted.open = 1
    until(lambda: len(counted.sent) == 4)
    assert counted.sent[3][0] == counted.sent[2][0] != counted.sent[1][0]


def test_what_is_over_is_drawn_once_more_and_a_session_that_ended_is_said(counted: Counted) -> None:
    counted.follow()._ipython_display_()
    counted.open, counted.over = 2, True
    until(lambda: not followers())
    assert "2 open" in counted.sent[-1][2]
    counted.over = False
    counted.follow()._ipython_display_()
    counted.gone = True
    until(lambda: not followers())
    assert counted.sent[-1][2].endswith("session 'a' has ended") and "2 open" in counted.sent[-1][2]


def test_an_endpoint_is_told_apart_by_its_session(counted: Counted) -> None:
    endpoint: Any = SimpleNamespace(core=SimpleNamespace(name="a"), look=lambda: (counted.card(), False))
    assert endpoint_view(endpoint)._what == "endpoint of a"
