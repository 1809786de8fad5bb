"""Sessions of an audio-language model: the whole round, with the proof of a sync over the tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.trainers.ppo.spmd_trainer import SPMDPPOTrainerVL
from rlbench.weights.probe import Probe
from tests.hearing import save_ears, sounds
from tests.session.session_trainers import OPTIONS

pytestmark = pytest.mark.engine
FEW = {**OPTIONS, "rollout_batch_size": 4, "n": 2, "train_batch_size": 8, "micro_train_batch_size": 2}
"""A sound costs 30 s of frames whatever its length: two micro-batches of a step on each rank, of few samples."""


def asked() -> list[dict[str, Any]]:
    """Three prompts with a sound, in forms that people write, and one of text."""
    one, two, three = sounds(3)
    what = {"type": "text", "text": "what?"}
    return [
        {"prompt": [{"role": "user", "content": [{"type": "audio", "audio": one.data}, what]}]},
        {"prompt": [{"role": "user", "content": "<audio>what?"}], "audios": [two.decoded()]},
        {"prompt": [{"role": "user", "content": [{"type": "audio", "audio_url": three.data_url}, what]}]},
        {"prompt": [{"role": "user", "content": "what?"}]},
    ]


def widen_tower() -> None:
    for name, parameter in module.named_parameters():  # type: ignore[name-defined]
        if ".audio_tower." in name:
            parameter.to_local().data.mul_(1.2)


def reward(rollout: Any) -> float:
    """Another number for each completion: of two of a prompt one is better."""
    return float(sum(rollout.token_ids) % 97) + len(rollout.sounds)


def test_a_session_hears_trains_syncs_goes_back_and_saves_what_transformers_loads(cluster: Any, tmp_path: Path) -> None:
    from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

    (tmp_path / "ears").mkdir()
    with rb.Session(save_ears(tmp_path / "ears"), train=rb.Train(lr=1e-3, shards=2)) as session:
        rollouts = session.rollout(asked(), n=2, max_tokens=6, seed=1)
        batch = rollouts.score(reward).batch(rb.rl.group_normalized())
        assert [len(own) for own in batch.sounds] == [1] * 6 + [0] * 2
        assert session.preflight(batch, strict=True).passed
        before = session.logprobs(batch)
        assert np.abs(before - rollouts.logprobs).max() < 1e-5, "the sampler heard the same"
        whole = [[*r.prompt_token_ids.tolist(), *r.token_ids] for r in rollouts.flat]
        again = session.inference.logprobs(whole[:1], sounds=[rollouts[0][0].sounds])
        given = rollouts.responses.with_values(rollouts.logprobs)[0]
        assert again[0][-len(given) :] == pytest.approx(given, abs=1e-5)

        session.train_step(batch)
        trained = session.logprobs(batch)
        assert np.abs(trained - before).max() > 1e-4
        session.train.run(widen_tower)
        assert np.abs(session.logprobs(batch) - trained).max() > 1e-4
        assert Probe.of(session.inference.info).kind == "audio"
        assert not session.preflight(batch).passed, "the replica has another tower"
        assert session.sync_weights().gap < 1e-4
        assert session.preflight(strict=True).passed

        tree = rollouts.score(reward).fork(0, at=1, n=2)
        assert tree.prompts[0].sounds == rollouts.prompts[0].sounds and tree.samples == rollouts.samples + 2
        session.freeze("model.audio_tower")
        assert session.train_step(batch).grad_norm > 0
        assert session.sync_weights().gap < 1e-4
        session.unfreeze()

        stream = rb.data.PromptSet.of(rb.data.as_prompts(asked() * 2)).stream(seed=3)
        trainer = session.trainer("grpo", stream, reward, trainer_class=SPMDPPOTrainerVL, **FEW)
        (made,) = trainer.fit(1)
        assert np.isfinite(made["policy_loss"]) and made["mismatch/kl"] < 1e-6

        saved = session.train.save(tmp_path / "saved")
        model = Qwen2AudioForConditionalGeneration.from_pretrained(tmp_path / "saved")
        assert model.model.language_model.embed_tokens.weight.std() > 0.01, saved
        ours = session.train.run(weights)[0]
        for name, parameter in model.named_parameters():
            np.testing.assert_array_equal(parameter.detach().numpy(), ours[name], err_msg=name)
        assert AutoProcessor.from_pretrained(tmp_path / "saved").feature_extractor.sampling_rate == 16_000
        for _ in range(3):
            session.undo()
        np.testing.assert_array_equal(session.logprobs(batch), before)
        learn_from_texts(session)
        judged_and_valued(session, stream)


def learn_from_texts(session: Any) -> None:
    """Take a step on demonstrations with sounds, and one on pairs."""
    rows = [{**row, "completion": "bell", "chosen": "bell", "rejected": "horn"} for row in asked()]
    shown = rb.data.demonstrations(rows, session)
    assert [len(own) for own in shown.sounds] == [1, 1, 1, 0]
    with pytest.raises(rb.RLBenchError, match="sound tokens, its 1 sounds"):
        session.train_step(shown.replace(sounds=shown.sounds[1:] + shown.sounds[:1]), "sft")
    first = session.train_step(shown, "sft")["loss"]
    assert session.train_step(rb.data.pairs(rows, session), rb.rl.simpo()).grad_norm > 0
    assert float(-session.logprobs(shown)[shown.mask].mean()) < first


def judged_and_valued(session: Any, stream: Any) -> None:
    """Train a reward model that hears, and a policy against it with a critic that does."""
    rows = [{**row, "chosen": "bell", "rejected": "horn", "heads": {"tone": "A"}} for row in asked()]
    trainer = session.trainer("reward", data=rows, heads=["tone", "pace"], train_batch_size=4, lr=1e-2)
    with trainer.session as rm:
        first, *_, last = trainer.fit(4)
        assert last["loss"] < first["loss"] and last["reward_accuracy/tone"] == 1.0
        rollouts = session.rollout(asked(), n=2, max_tokens=4, seed=2)
        scored = rollouts.score(rm)
        kept = rb.rewards.model(
            rm.save(str(Path(rm.frozen().path).parent / "kept")).path, as_sampled=True, device="cpu"
        )
        np.testing.assert_allclose(rollouts.score(kept).rewards, scored.rewards, atol=1e-4)
        assert scored.components.keys() == {"tone", "pace"}
        made = session.trainer("ppo", stream, rm, critic=True, **FEW).fit(1)[0]
        assert np.isfinite([made["reward"], made["critic_loss"], made["policy_loss"]]).all() and "tone" in str(made)


def weights() -> dict[str, Any]:
    found = module.named_parameters()  # type: ignore[name-defined]
    return {name: parameter.full_tensor().detach().numpy().copy() for name, parameter in found}


def alter_adapters_of_the_tower() -> None:
    from rlbench.nn.lora import Adapted

    for path, kind, parameter in Adapted.of(module).parameters():  # type: ignore[name-defined]
        if ".audio_tower." in path and kind == "lora_B":
            parameter.to_local().data.add_(0.05)


def test_adapters_of_language_model_and_tower_reach_the_replica_merged(cluster: Any, tmp_path: Path) -> None:
    with rb.Session(save_ears(tmp_path), train=rb.Train(lr=1e-2, lora=rb.Lora(rank=8))) as session:
        rollouts = session.rollout(asked(), n=2, max_tokens=6, seed=1)
        batch = rollouts.score(reward).batch(rb.rl.group_normalized())
        before = session.logprobs(batch)
        session.train_step(batch)
        session.train.run(alter_adapters_of_the_tower)
        assert np.abs(session.logprobs(batch) - before).max() > 1e-3
        assert not session.preflight(batch).passed, "the replica has the base still"
        assert session.sync_weights().gap < 1e-4
        assert session.preflight(strict=True).passed
