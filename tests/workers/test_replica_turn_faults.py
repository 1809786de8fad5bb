"""Environments that raise, hang or are interrupted, on a real engine: what each costs, and what is told."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from rlbench.dispatch import context as dispatch_context
from rlbench.envs import Env, Step
from tests.clock import LIMIT_S, until

from .turns import job

pytestmark = pytest.mark.engine


WOKEN = threading.Event()


class Faulty(Env):
    """What can go wrong, by the prompt's label."""

    closed: list[int]

    def reset(self, prompt):
        self.what = ["fine", "raises", "hangs", "wrong", "ids", "reset", "exits"][prompt.label]
        if self.what == "reset":
            raise RuntimeError("no board")

    def step(self, turn):
        if turn.number == 0 or self.what == "fine":
            return Step("x", reward=1.0)
        if self.what == "raises":
            raise ValueError("bad <b>turn</b>")
        if self.what == "exits":
            sys.exit(3)
        if self.what == "hangs":
            WOKEN.wait(LIMIT_S)
        return "done" if self.what == "wrong" else Step([10**6])


def test_an_environments_fault_costs_its_own_sample_and_is_told(draw):
    prompts = ["a", "b", "c", "d", "e", "f", "g"]
    WOKEN.clear()
    try:
        found = draw(job(prompts, Faulty(), max_turns=3, timeout_s=3, ignore_eos=True))
    finally:  # it did not wait for the one that hangs: that hangs until now
        WOKEN.set()
    assert [found.finish((p, 0)) for p in range(7)] == ["length"] + ["abort"] * 6
    errors = {p: found.info((p, 0)).get("errors") for p in range(7)}
    assert errors[0] is None and all(len(errors[p]) == 1 and errors[p][0]["ended"] for p in range(1, 7))
    told = {p: (errors[p][0]["where"], errors[p][0]["kind"], errors[p][0]["turn"]) for p in range(1, 7)}
    assert told == {
        1: ("step", "ValueError", 1),
        2: ("step", "TimeoutError", 1),
        3: ("step", "DataError", 1),
        4: ("step", "DataError", 1),
        5: ("reset", "RuntimeError", 0),
        6: ("step", "SystemExit", 1),
    }
    line = errors[1][0]["line"]
    assert line[0] == __file__ and line[2] == "step" and "raise ValueError" in line[3]
    assert "env_timeout_s=3" in errors[2][0]["message"] and "Step" in errors[3][0]["message"]
    for p in range(1, 5):  # finished turns stay: six tokens, an observation of one, six tokens
        assert found.of("mask", (p, 0)) == [True] * 6 + [False] + [True] * 6
    assert found.of("token_ids", (5, 0)) == []
    rewards = found.arrays.turn_rewards[found.keys.index((1, 0))]
    assert rewards[0] == 1.0 and np.isnan(rewards[1])


CLOSED: list[str] = []


class Closing(Env):
    def __init__(self, name="plain"):
        self.name = name

    def step(self, turn):
        return Step(done=True) if turn.number else Step("x")

    def close(self):
        CLOSED.append(self.name)
        if self.name == "bad":
            raise OSError("stuck")


class ClosingAsync(Closing):
    async def close(self):
        await asyncio.sleep(0.01)
        CLOSED.append("async")


def test_every_environment_is_closed_and_a_close_that_raises_is_told(draw):
    CLOSED.clear()
    for env, wanted in ((Closing, ["plain"] * 3), (ClosingAsync, ["async"] * 3), (lambda: Closing("bad"), ["bad"] * 3)):
        CLOSED.clear()
        found = draw(job(["a"], env, n=3))
        assert wanted == CLOSED
    assert [e["where"] for e in found.info()["errors"]] == ["close"] and found.finish() != "abort"


STOPS: list[Callable[[], None]] = []
WAITS = threading.Event()


class Waiting(Env):
    """The second sample's hangs in its second turn; the first's then stops the call, in its seventh."""

    def step(self, turn):
        if turn.number == 1 and turn.prompt.label == 1:
            WAITS.set()
            WOKEN.wait(LIMIT_S)
        if turn.number == 6 and turn.prompt.label == 0:
            WAITS.wait(LIMIT_S)
            STOPS.pop()()
        return Step("x", reward=1.0)

    def close(self):
        CLOSED.append("waiting")


def test_a_stop_keeps_finished_turns_and_waits_for_no_environment(turn_replica, turn_lane, draw, called, monkeypatch):
    CLOSED.clear()
    WAITS.clear()
    WOKEN.clear()
    STOPS[:] = [called.request_stop]
    long = {"max_turns": 400, "max_tokens": 4, "ignore_eos": True}
    try:
        found = draw(job([[1, 2], [3, 4]], Waiting(), **long))
    finally:  # it did not wait for the one that hangs: that hangs until now
        WOKEN.set()
    assert [found.finish(key) for key in sorted(found.keys)] == ["abort", "abort"]
    assert found.of("mask", (1, 0)) == [True] * 4 + [False] + [True] * 4  # two turns, the second not answered
    first = found.arrays.turn_rewards[found.keys.index((0, 0))]
    assert len(first) > 5 and np.isfinite(first[:-1]).all()
    assert turn_replica.status()["running"] == 0
    until(lambda: len(CLOSED) == 2)  # the one that hung is closed as soon as it wakes
    assert CLOSED == ["waiting"] * 2
    monkeypatch.setattr(dispatch_context, "_current", None)
    assert len(turn_lane(turn_replica.generate, job(["a"])).token_ids) > 0
