"""Sessions of other models that see than "tiny-vision": the whole round, with the proof of a sync over the tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import BuildError
from tests.trainers.seeing import FAMILIES, save_eyes

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


def adapted_layers() -> list[str]:
    from rlbench.nn.lora import Adapted

    return list(Adapted.of(module).layers)  # type: ignore[name-defined]


def alter_adapters_of_the_tower() -> None:
    from rlbench.nn.lora import Adapted

    for path, kind, parameter in Adapted.of(module).parameters():  # type: ignore[name-defined]
        if ".visual." in path and kind == "lora_B":
            parameter.to_local().data.add_(0.05)


@pytest.mark.parametrize(("family", "adapters"), [(FAMILIES[0], 2), (FAMILIES[1], 2), (FAMILIES[1], 0)])
def test_adapters_of_language_model_and_tower_reach_the_replica(
    cluster: Any, tmp_path: Path, family: str, adapters: int
) -> None:
    """Sent by themselves, where the replica computes with base and adapter, or merged."""
    asked = [*rb.tiny.vision_prompts(3), {"prompt": "what?", "label": "r"}]
    train = rb.Train(lr=1e-2, lora=rb.Lora(rank=8))
    inference = {"adapters": adapters} if adapters else {}
    with rb.Session(save_eyes(tmp_path, family), train=train, inference=inference) as session:
        layers = session.train.run(adapted_layers)[0]
        assert {".visual." in path for path in layers} == {True, False}
        assert any("merger" in path for path in layers), "what lies between the two, too"
        rollouts = session.rollout(asked, n=4, max_tokens=6, seed=1)
        batch = rollouts.score(lambda rollout: float(len(rollout.text) % 2)).batch(rb.rl.group_normalized())
        before = session.logprobs(batch)
        session.train_step(batch)
        session.train.run(alter_adapters_of_the_tower)
        assert np.abs(session.logprobs(batch) - before).max() > 1e-3
        assert not session.preflight(batch).passed, "the replica has the base still"
        done = session.sync_weights()
        assert done.gap < 1e-4
        if adapters:
            assert done.tensors == 2 * len(layers)
            drawn = session.rollout(asked, n=4, max_tokens=6, seed=1, adapter="base")
            np.testing.assert_array_equal(drawn.responses.values, rollouts.responses.values)
        assert session.preflight(strict=True).passed
        session.undo()
        np.testing.assert_array_equal(session.logprobs(batch), before)
        session.sync_weights()
        assert session.preflight(batch, strict=True).passed


def test_adapters_that_vllm_would_drop_are_refused(cluster: Any, tmp_path: Path) -> None:
    inference = {"adapters": 1, "engine_kwargs": {"language_model_only": True}}
    with pytest.raises(BuildError, match=r"none on the tower.*Leave adapters= out"):
        rb.Session(save_eyes(tmp_path), name="refused", train=rb.Train(lora=rb.Lora(rank=8)), inference=inference)
