"""Tickets and replies travel as lists and numbers where they can, and arrive as what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlbench.dispatch.protocol import Failure, Reply, Ticket


@pytest.mark.parametrize("keywords", [(), ("lr",), ("lr", "what")])
def test_a_ticket_arrives_with_its_verb_and_the_names_of_keywords(keywords: tuple[str, ...]) -> None:
    ticket = Ticket(3, (1 << 60) + 7, "0f3a", 2, "rlbench/demo/actor/0", 5, True)
    sent = ticket.sent("train_step", dict.fromkeys(keywords))
    assert all(type(part) in (int, str, bool) for part in sent)  # what Ray packs without pickle
    assert Ticket.received(sent) == (ticket, "train_step", list(keywords))


def test_a_reply_of_nothing_travels_as_its_count() -> None:
    assert Reply(issued=4).sent() == 4
    assert Reply.received(4) == Reply(issued=4)


@pytest.mark.parametrize(
    "fields",
    [
        {"value": 0},
        {"value": False},
        {"value": 7},
        {"value": np.zeros(3)},
        {"output": "half a character: \udce2"},
        {"stopped": True},
        {"failure": Failure("ValueError", "no", "")},
    ],
    ids=str,
)
def test_whatever_a_reply_says_is_kept(fields: dict[str, Any]) -> None:
    reply = Reply(**fields)
    assert reply.sent() is reply
    assert Reply.received(reply.sent()) is reply
