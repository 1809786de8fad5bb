"""A session whose ranks split sequences: every verb as in any other, with the numbers of one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.options import OptionError
from rlbench.tiny import tasks
from tests.session.session_trainers import checksum, grpo

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def split(cluster: Any) -> Iterator[Any]:
    train = rb.Train(lr=1e-5, shards=2, sequence_parallel=2)
    with rb.Session("tiny", train=train, name="split", reference=True, seed=7) as made:
        yield made


def test_a_step_is_that_of_a_session_that_splits_nothing(split: Any, session: Any) -> None:
    scored = split.rollout(tasks.prompts(4), n=4, max_tokens=12, seed=3).score(tasks.reward)
    batch = scored.batch(advantage=rb.rl.group_normalized())
    gradients = []
    for one in (session, split):
        one.zero_grad()
        one.forward_backward(batch, rb.rl.grpo(kl_coef=0.1))
        gradients.append(one.gradients())
        one.zero_grad()
    whole, here = gradients
    np.testing.assert_allclose(here.squares, whole.squares, rtol=1e-4, atol=1e-12)
    np.testing.assert_allclose(here.tokens[0].hidden, whole.tokens[0].hidden, rtol=1e-4, atol=1e-9)
    before = split.train.run(checksum)
    step = split.train_step(batch, loss="grpo")
    assert step.skipped is None and step.logprob_gap < 1e-4 and len(step.tokens["logprobs"]) == batch.tokens
    assert split.sync_weights().gap <= 1e-4
    split.undo()
    assert split.train.run(checksum) == before


def slices() -> int:
    return int(trainer.strategy.sequence.size)


def test_its_trainers_split_sequences_too(split: Any) -> None:
    made = grpo(split)
    assert split.train.run(slices) == [2, 2]
    metrics = made.step()
    assert metrics["train_steps"] == 1 and metrics["mismatch/max_gap"] < 1e-3
    with pytest.raises(OptionError, match="sequence_parallel=3 does not divide"):
        grpo(split, sp_size=3)


def test_ranks_that_do_not_divide_are_refused_before_anything_starts(cluster: Any, qwen: str) -> None:
    with pytest.raises(OptionError, match="sequence_parallel=3 does not divide 2 ranks"):
        rb.Session(qwen, train=rb.Train(shards=2, sequence_parallel=3), name="odd")
