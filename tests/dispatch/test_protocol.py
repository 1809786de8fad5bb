"""Tickets and replies travel as bytes, with what is plain in them, and arrive as what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlbench.dispatch.protocol import MOST_CHARACTERS, Failure, Reply, Ticket, is_plain

LONG = "x" * (MOST_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("args", "kwargs", "beside"),
    [
        ((), {}, []),
        (("nothing", (), {}, None), {}, []),
        ((1, 2.5, True), {"lr": 1e-4, "what": None}, []),
        ((LONG, 1 << 80, b"blob"), {"names": ["a", ("b", {"c": 1})], "rows": {1, 2}}, [LONG, b"blob", {1, 2}]),
    ],
    ids=["nothing", "of a user's method", "numbers", "beside"],
)
def test_a_call_arrives_as_it_was_sent(args: tuple[Any, ...], kwargs: dict[str, Any], beside: list[Any]) -> None:
    ticket = Ticket(3, (1 << 60) + 7, "0f3a", 2, "rlbench/demo/actor/0", 5, True)
    sent, left = ticket.sent("train_step", args, kwargs)
    assert left == beside
    assert Ticket.received(sent, left) == (ticket, "train_step", list(args), kwargs)


def test_arguments_of_other_kinds_are_left_to_ray() -> None:
    itself: list[Any] = []
    itself.append(itself)
    for value in (
        np.float64(1.0),
        np.zeros(2),
        {"rows": np.zeros(2)},
        itself,
        list(range(99)),
        type("Own", (str,), {})(),
    ):
        assert not is_plain(value)


@pytest.mark.parametrize(
    "fields",
    [
        {"issued": 4},
        {"value": 0},
        {"value": False},
        {"value": (7, "a")},
        {"output": "half a character: \udce2"},
        {"stopped": True, "value": 3},
    ],
    ids=str,
)
def test_a_plain_reply_travels_as_bytes(fields: dict[str, Any]) -> None:
    sent = Reply(**fields).sent()
    assert isinstance(sent, bytes) and Reply.received(sent) == Reply(**fields)


@pytest.mark.parametrize(
    "fields", [{"value": np.zeros(3)}, {"failure": Failure("ValueError", "no", "")}, {"output": LONG}], ids=list
)
def test_another_reply_travels_as_it_is(fields: dict[str, Any]) -> None:
    reply = Reply(**fields)
    assert reply.sent() is reply and Reply.received(reply.sent()) is reply
