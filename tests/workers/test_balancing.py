"""Which replica serves a call that arrives at one of several, and what a client hears where that one is away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlbench.envs.policy import UNKEPT
from rlbench.workers.replica.serving.balancing import REMEMBERED, Balancer, beginning
from rlbench.workers.replica.serving.options import replica_of
from rlbench.workers.replica.serving.refusal import Refusal

URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3")


def ask(*texts: str) -> dict[str, Any]:
    """A chat in which user and assistant take turns."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def test_a_named_run_is_served_by_one_replica_wherever_its_calls_arrive() -> None:
    balancers = [Balancer(own, URLS) for own in range(3)]
    for name in map(str, range(50)):
        assert {balancer.owner(name, ask(name), False) for balancer in balancers} == {replica_of(name, 3)}
    assert {replica_of(str(name), 3) for name in range(50)} == {0, 1, 2}


def test_new_conversations_go_where_the_fewest_calls_are_open_and_stay_there() -> None:
    balancer = Balancer(1, URLS)
    begun: dict[str, int] = {}
    for number in range(9):
        text = f"You are a sorter. Sort {number} {number}"
        begun[text] = balancer.owner("", ask(text), False)
        with balancer.serving(begun[text]):
            pass
    assert sorted(begun.values()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for text, owner in begun.items():
        assert balancer.owner("", ask(f" {text}\n", "12", "again"), False) == owner, "a client may trim white space"
        assert balancer.owner("", ask(text, "12", "again", "21", "and"), False) == owner
    busy = begun["You are a sorter. Sort 0 0"]
    with balancer.serving(busy), balancer.serving((busy + 1) % 3):
        assert balancer.owner("", ask("something new"), False) == (busy + 2) % 3


def test_what_another_replica_hands_on_and_what_is_not_kept_is_served_where_it_arrives() -> None:
    balancer = Balancer(2, URLS)
    for number in range(6):
        assert balancer.owner(str(number), ask("a"), True) == 2 == balancer.owner(UNKEPT, ask("a"), False)
    assert balancer.owner("", {}, False) == 2  # which models there are


@pytest.mark.parametrize(
    ("first", "later", "goes_on"),
    [
        (ask("a"), ask("a", "b", "c"), True),
        (ask("ab"), ask("a", "b", "c"), False),
        ({"system": "s", **ask("a")}, {"system": "s", **ask("a", "b")}, True),
        ({"system": "s", **ask("a")}, {"system": "t", **ask("a", "b")}, False),
        ({"prompt": "one two"}, {"prompt": "one  two three"}, True),
        ({"prompt": [1, 2]}, {"prompt": [1, 2, 3]}, True),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, ask("a"), False),
        ({"messages": "wrong"}, {"prompt": None}, True),
        ({"messages": [None, 3]}, {"messages": [None, 3, "x"]}, True),
    ],
)
def test_a_request_that_goes_on_from_another_begins_with_it(first: Any, later: Any, goes_on: bool) -> None:
    assert beginning(later).startswith(beginning(first)) == goes_on


def test_what_is_remembered_is_bounded() -> None:
    balancer = Balancer(0, URLS)
    for number in range(REMEMBERED + 10):
        balancer.owner("", ask(f"{number}."), False)
    assert len(balancer._known) == REMEMBERED
    for number in range(5):
        balancer.owner("", ask(f"{number}" * (16 << 20)), False)
    assert sum(map(len, balancer._known)) <= 33 << 20


def called(balancer: Balancer, run: str, asked: dict[str, Any]) -> list[int]:
    """Let a call arrive where no other replica answers; return how often it was served there."""
    served: list[int] = []

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        raise AssertionError(f"{message} was sent, and no replica has answered")

    async def serve() -> None:
        served.append(balancer._open[balancer.own])

    scope = {"path": "/v1/chat/completions", "headers": [(b"authorization", b"Bearer k")]}
    asyncio.run(balancer.answer(run, asked, scope, b"{}", receive, send, serve))
    return served


def test_a_runs_replica_that_is_away_is_said_before_anything_is_sent() -> None:
    balancer = Balancer(0, URLS)
    run = next(name for name in map(str, range(50)) if replica_of(name, 3) == 1)
    for _ in range(2):
        with pytest.raises(Refusal, match="replica 1, which serves this call, does not answer") as refused:
            called(balancer, run, ask("a"))
        assert refused.value.status == 503 and balancer._open == [0, 0, 0]


def test_a_conversation_whose_replica_is_away_goes_on_where_it_is_answered() -> None:
    balancer = Balancer(0, URLS)
    with balancer.serving(0), balancer.serving(2):
        assert balancer.owner("", ask("a"), False) == 1
    assert called(balancer, "", ask("a", "b", "c")) == [1], "it is counted as open while it is served"
    assert called(balancer, "", ask("something new")) == [1]
    with balancer.serving(0), balancer.serving(0):
        assert balancer.owner("", ask("a", "b", "c", "d", "e"), False) == 0, "it stays where it went"
    assert balancer._left_out == {1, 2}
    assert Balancer(0, URLS).owner("", ask("new"), False) == 0 == balancer._open[0]
