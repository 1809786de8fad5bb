"""Sessions of other models that see than "tiny-vision": the whole round, with the proof of a sync over the tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from tests.trainers.seeing import save_eyes

pytestmark = pytest.mark.engine


def widen_tower() -> None:
    for name, parameter in module.named_parameters():  # type: ignore[name-defined]
        if ".visual." in name:
            parameter.to_local().data.mul_(1.2)


def test_a_qwen3_vl_rolls_out_trains_syncs_and_goes_back(cluster: Any, tmp_path: Path) -> None:
    asked = [*rb.tiny.vision_prompts(3), {"prompt": "what?", "label": "r"}]
    with rb.Session(save_eyes(tmp_path, "qwen3_vl"), train=rb.Train(lr=1e-3)) as session:
        rollouts = session.rollout(asked, n=4, max_tokens=6, seed=1)
        batch = rollouts.score(lambda rollout: float(len(rollout.text) % 2)).batch(rb.rl.group_normalized())
        assert [len(images) for images in batch.images] == [1] * 12 + [0] * 4
        assert session.preflight(batch, strict=True).passed
        before = session.logprobs(batch)
        session.train_step(batch)
        trained = session.logprobs(batch)
        assert np.abs(trained - before).max() > 1e-4
        session.train.run(widen_tower)
        assert np.abs(session.logprobs(batch) - trained).max() > 1e-4
        assert not session.preflight(batch).passed, "the replica has another tower"
        assert session.sync_weights().gap < 1e-4
        assert session.preflight(strict=True).passed
        session.undo()
        np.testing.assert_array_equal(session.logprobs(batch), before)
