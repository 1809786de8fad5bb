"""A session that computes in float16 on both sides: as any other, with a loss scale in its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.options import OptionError
from rlbench.tiny import tasks

pytestmark = pytest.mark.engine
PROMPTS = tasks.prompts(4)


@pytest.fixture(scope="module")
def half(cluster: Any) -> Iterator[Any]:
    with rb.Session("tiny", train=rb.Train(fp16=True, lr=1e-4), name="float16") as made:
        yield made


def drawn(session: Any) -> Any:
    scored = session.rollout(PROMPTS, n=4, max_tokens=8, seed=3).score(lambda sample: float(sum(sample.token_ids) % 3))
    return scored.batch(advantage=lambda rewards, group: rewards - 1.0)


def test_a_session_in_float16_steps_syncs_and_goes_back(half: Any) -> None:
    assert half.train.info["dtype"] == half.inference.info["dtype"] == "float16"
    batch = drawn(half)
    first = half.train_step(batch)
    assert first.skipped is None and first.loss_scale == 2.0**16 and first.logprob_gap < 0.02
    assert first.version == half.version == 1
    half.undo()
    again = half.train_step(batch)
    assert again.grad_norm == first.grad_norm and again.loss == first.loss
    synced = half.sync_weights()
    assert 0 < synced.gap <= synced.allowed


def test_gradients_of_tokens_and_parameters_are_shown_unscaled(half: Any) -> None:
    batch = drawn(half)
    half.zero_grad()
    half.forward_backward(batch, lambda inputs: (-inputs.logprobs, {}))
    seen = half.gradients()
    coefficient = seen.tokens[0].coefficient
    np.testing.assert_allclose(coefficient, np.full(len(coefficient), -1 / len(coefficient)), rtol=1e-6)
    assert seen.tokens[0].hidden.max() < 1.0
    norm = float(np.sqrt(seen.squares.sum()))
    assert norm < 100.0 and half.optim_step().grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_trainer_of_the_session_computes_in_float16_too(half: Any) -> None:
    options = {"prompts": PROMPTS, "reward": lambda sample: float(len(sample.token_ids) % 2)}
    with pytest.raises(OptionError, match="bf16=True cannot be honoured: the session was made with bf16=False"):
        half.trainer("grpo", bf16=True, **options)
    trainer = half.trainer("grpo", train_batch_size=16, rollout_batch_size=4, n=4, max_tokens=8, **options)
    metrics = trainer.step()
    assert metrics["actor_loss_scale"] in (2.0**16, 2.0**15)
