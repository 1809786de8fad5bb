"""Rollouts of a real session: their tokens read as text, and a step's numbers stand beside them."""

import numpy as np
import pytest

import rlbench as rb
from rlbench.data import Rollouts
from rlbench.data.rollouts.pieces import pieces_of

pytestmark = pytest.mark.engine


def test_tokens_read_as_text_and_a_step_gives_its_channels(session, tmp_path):
    rollouts = session.rollout(["sort 321 :", "sort 54 :"], n=4, max_tokens=8, temperature=1.0, progress=False)
    pieces = pieces_of(rollouts.tokenizer)
    for sample in rollouts.flat:
        assert "".join(p.text for p in pieces(sample.token_ids)) == sample.text
    batch = rollouts.score(np.arange(8) % 3).batch(advantage=rb.rl.group_normalized())
    seen = rollouts.with_batch(batch, session.train_step(batch, loss="grpo"))
    wanted = {"advantage", "mask", "trainer_logprob", "entropy", "difference", "ratio", "old_logprob"}
    assert wanted <= set(seen.channels)
    np.testing.assert_allclose(seen.channels["ratio"], 1, atol=1e-4)  # the first step on a batch
    np.testing.assert_allclose(seen.channels["difference"], 0, atol=1e-3)
    back = Rollouts.from_parquet(seen.to_parquet(tmp_path / "r.parquet"))
    assert back.tokenizer == rollouts.tokenizer and np.array_equal(back.channels["entropy"], seen.channels["entropy"])
