"""Rewards that are cancelled, or stopped from another thread: a failure or what there is, and nothing left behind."""

import asyncio
import threading
import time

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import DataError, Stopped
from tests.data.values import rollouts
from tests.rewards.values import nothing_left


def test_a_reward_that_is_cancelled_by_what_it_waits_for_is_a_failure_of_its_own():
    async def reward(rollout):
        if rollout.index == 2:
            raise asyncio.CancelledError("the client gave up")
        await asyncio.sleep(0)
        return 1.0

    scored = rollouts().score(reward, on_error="keep")
    np.testing.assert_array_equal(scored.rewards, [1, 1, np.nan, 1, 1, 1])
    assert "CancelledError" in scored.reward_errors[0].error
    with pytest.raises(DataError, match="CancelledError: the client gave up on completion 2"):
        rollouts().score(reward)


def test_a_coroutine_that_cancels_itself_leaves_failures_and_no_hole():
    async def reward(rollout):
        asyncio.current_task().cancel()
        await asyncio.sleep(1)

    scored = rollouts().score(reward, on_error="keep")
    assert np.isnan(scored.rewards).all() and len(scored.reward_errors) == 6
    with pytest.raises(DataError, match="ended without an outcome"):
        rollouts().score(reward)


def unhurried(rollout):
    time.sleep(0.3)
    return 1.0


async def awaiting(rollout):
    await asyncio.sleep(60 if rollout.index else 0)
    return 1.0


def hanging(rollout):
    if rollout.index:
        time.sleep(60)
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "scorer",
    [
        rb.rewards.function(unhurried),
        rb.rewards.function(awaiting),
        rb.rewards.function(hanging, isolate=True, concurrency=2),
        rb.rewards.weighted({"a": (rb.rewards.function(hanging, isolate=True), 1.0)}),
        rb.rewards.mixture({"12": awaiting}, default=awaiting),
    ],
)
def test_a_stop_from_another_thread_ends_all_kinds_and_leaves_nothing(scorer):
    class Watched(rb.rewards.Board):
        def put(self, index, outcome, seconds):
            super().put(index, outcome, seconds)
            self.stop()

    board, whole, over = Watched(), rollouts(), threading.Event()
    part = threading.Thread(target=lambda: (over.wait(4), board.stop()))  # parts have boards of their own
    part.start()
    with nothing_left(), pytest.raises(Stopped):
        scorer.score_all(list(whole.flat), board)
    over.set()
    part.join()
    assert len(board.rewards) < 6
