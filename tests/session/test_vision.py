"""A session that sees: steps, syncs with proof of the tower, undo, freezing, export; and the task is learned."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import rlbench as rb
from rlbench.data.base.ragged import rows_in_order
from rlbench.data.batches.batch import as_batch
from rlbench.tiny import recipe
from rlbench.trainers.ppo.spmd_trainer import SPMDPPOTrainerVL
from rlbench.weights.probe import Probe
from tests.session.session_trainers import OPTIONS

pytestmark = [pytest.mark.engine, pytest.mark.curve]  # the model takes a minute or two to make
STEPS = 40


@pytest.fixture(scope="module")
def seeing(cluster: Any) -> Iterator[Any]:
    train = rb.Train(lr=4 * recipe.lr, betas=recipe.betas, max_norm=recipe.grad_clip, shards=2)
    with rb.Session("tiny-vision", train=train, seed=3) as made:
        yield made


@pytest.fixture(scope="module")
def batch(seeing: Any) -> Any:
    """Half of the prompts have a picture."""
    asked = [*rb.tiny.vision_prompts(4), *({"prompt": "what?", "label": "r"} for _ in range(4))]
    rollouts = seeing.rollout(asked, n=4, max_tokens=6, seed=1)
    return rollouts.score(lambda rollout: float(len(rollout.text) % 2)).batch(rb.rl.group_normalized())


def probed(session: Any) -> list[float]:
    """The gap of each sequence of the probe, the last with the picture."""
    probe = Probe.of(session.inference.info)
    given = as_batch(probe.tokens, probe.media)
    ours = session.train.call_all("policy_forward", given, {}, finish=rows_in_order).result()["logprobs"]
    return [
        float(np.abs(np.asarray(a) - b).max())
        for a, b in zip(ours, session.inference.logprobs(probe.tokens, probe.media), strict=True)
    ]


def perturb_tower() -> None:
    for name, parameter in module.named_parameters():
        if ".visual." in name:
            parameter.to_local().data.mul_(1.5)


def test_both_sides_agree_on_pictures_and_images_stay_with_their_rows(seeing: Any, batch: Any) -> None:
    assert [len(images) for images in batch.images] == [1] * 16 + [0] * 16
    assert len({id(images[0]) for images in batch.images if images}) == 4
    assert seeing.preflight(batch, strict=True).passed


def test_the_proof_of_a_sync_covers_the_tower(seeing: Any) -> None:
    seeing.sync_weights()
    assert max(probed(seeing)) < 1e-4
    kept = seeing.snapshot()
    seeing.train.run(perturb_tower)
    apart = probed(seeing)
    assert max(apart[:-1]) < 1e-4 and apart[-1] > 1e-3
    assert seeing.sync_weights().gap < 1e-4
    assert max(probed(seeing)) < 1e-4
    seeing.restore(kept)
    assert max(probed(seeing)) < 1e-4


def test_a_step_is_undone_and_exported_as_transformers_loads_it(seeing: Any, batch: Any, tmp_path: Any) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    before = seeing.logprobs(batch)
    assert seeing.train_step(batch, lr=1e-3).reward == pytest.approx(batch.rewards.mean())
    moved = seeing.logprobs(batch)
    saved = seeing.train.save(tmp_path / "model")
    seeing.undo()
    np.testing.assert_array_equal(seeing.logprobs(batch), before)

    model = AutoModelForImageTextToText.from_pretrained(saved.path)
    processor = AutoProcessor.from_pretrained(saved.path)
    pixels = processor.image_processor(images=[batch.images[0][0].pil()], return_tensors="pt")
    ids = torch.from_numpy(np.concatenate([batch.prompts[0], batch.responses[0]]).astype(np.int64))[None]
    kinds = (ids == processor.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits[0].log_softmax(-1)
    start = len(batch.prompts[0])
    expected = logits[torch.arange(start - 1, ids.shape[1] - 1), ids[0, start:]]
    np.testing.assert_allclose(moved[: len(expected)], expected.numpy(), atol=1e-4)


def test_a_frozen_tower_stays_as_it_is_on_both_sides(seeing: Any, batch: Any) -> None:
    kept, held = seeing.snapshot(), seeing.train.state_dict()
    frozen = seeing.freeze("model.visual")
    assert frozen and all(".visual." in name for name in frozen)
    assert seeing.sync_weights().unchanged == 0
    seeing.train_step(batch, lr=1e-3)
    synced = seeing.sync_weights()
    assert synced.unchanged == len(frozen) and max(probed(seeing)) < 1e-4, "the tower does not travel"
    for name, tensor in seeing.train.state_dict().items():
        assert torch.equal(tensor, held[name]) == (".visual." in name), name
    seeing.unfreeze()
    seeing.restore(kept)
    seeing.sync_weights()


def test_a_trainer_on_the_ranks_makes_experience_of_pictures_and_trains_on_it(seeing: Any) -> None:
    kept, mixed = seeing.snapshot(), [*rb.tiny.vision_prompts(28), *[{"prompt": "what?", "label": "rgby"}] * 4]
    stream = rb.data.PromptSet.of(rb.data.as_prompts(mixed)).stream(seed=3)
    trainer = seeing.trainer("grpo", stream, rb.tiny.vision_reward, trainer_class=SPMDPPOTrainerVL, **OPTIONS)
    last = trainer.fit(2)[-1]
    assert np.isfinite(last["policy_loss"]) and last["mismatch/kl"] < 1e-6 and 0 < last["reward"] < 1
    assert max(probed(seeing)) < 1e-4
    seeing.restore(kept)


def test_a_critic_sees_the_pictures_it_values(seeing: Any) -> None:
    kept, mixed = seeing.snapshot(), [*rb.tiny.vision_prompts(28), *[{"prompt": "what?", "label": "rgby"}] * 4]
    stream = rb.data.PromptSet.of(rb.data.as_prompts(mixed)).stream(seed=3)
    trainer = seeing.trainer("ppo", stream, rb.tiny.vision_reward, critic=True, critic_lr=1e-3, **OPTIONS)
    first, *_, last = trainer.fit(4)
    assert last["critic_loss"] < first["critic_loss"] and last["mismatch/kl"] < 1e-6
    seeing.restore(kept)


def test_demonstrations_teach_what_a_picture_shows_read_backwards_and_pairs_train(seeing: Any) -> None:
    kept, shown = seeing.snapshot(), backwards(rb.tiny.vision_prompts(512, seed=9), seeing)
    unseen = rb.tiny.vision_prompts(32, "eval")
    moved = [{**row, "label": other["label"]} for row, other in zip(unseen, [*unseen[1:], unseen[0]], strict=True)]
    before = float(seeing.logprobs(backwards(unseen, seeing)).mean())
    for start in range(0, len(shown), 32):
        seeing.train_step(shown[start : start + 32], "sft", lr=1e-3)
    own, others = (float(seeing.logprobs(backwards(rows, seeing)).mean()) for rows in (unseen, moved))
    assert own > before / 2 and own > others + 0.5, (before, own, others)
    seeing.restore(kept)

    pairs = [{"prompt": r["prompt"], "chosen": r["label"][::-1], "rejected": r["label"]} for r in unseen]
    trainer = seeing.trainer("dpo", data=rb.data.pairs(pairs, seeing), train_batch_size=32, lr=1e-4)
    first, *_, last = trainer.fit(4)
    assert last["loss"] < first["loss"] and last["reward_margin"] > 0
    seeing.restore(kept)


def test_a_reward_model_judges_by_the_picture_and_comes_back_from_its_folder(seeing: Any, tmp_path: Any) -> None:
    def judged(split: str, count: int) -> list[dict[str, Any]]:
        rows = rb.tiny.vision_prompts(count, split)
        others = [*rows[1:], rows[0]]
        texts = zip(rows, others, strict=True)
        return [{"prompt": r["prompt"], "chosen": r["label"], "rejected": o["label"]} for r, o in texts]

    with rb.RewardModel("tiny-vision", train=rb.Train(lr=1e-3)) as rm:
        pairs = rb.data.pairs(judged("train", 512), rm)
        for start in range(0, len(pairs), 64):
            rm.train_step(pairs[start : start + 64])
        unseen = rb.data.pairs(judged("eval", 64), rm)
        scores = rm.scores(unseen)
        accuracy = float((scores[::2] > scores[1::2]).mean())
        assert accuracy > 0.8, accuracy
        assert rm.evaluate(unseen).accuracy == pytest.approx(accuracy)
        swapped = unseen.replace(images=(*unseen.images[2:], *unseen.images[:2]))
        moved = rm.scores(swapped)
        assert float((moved[::2] < moved[1::2]).mean()) > 0.8, "the other picture makes the other answer right"
        rollouts = seeing.rollout(rb.tiny.vision_prompts(4, "eval"), n=2, max_tokens=8, progress=False)
        given = rollouts.score(rm)
        again = rm.scores(given.batch(rb.rl.group_normalized()))
        np.testing.assert_allclose(given.rewards, again, atol=1e-4)
        saved = rm.save(str(tmp_path / "rm"))
        kept = seeing.snapshot()
        trainer = seeing.trainer("grpo", rb.tiny.vision_prompts(32, "eval"), rm, **OPTIONS)
        assert "RewardModel" in seeing.train.run("type(trainer.reward_model).__name__")[0], "sharded over the ranks"
        assert np.isfinite(trainer.fit(1)[-1]["reward"])
        seeing.restore(kept)
    elsewhere = rollouts.score(rb.rewards.model(saved.path, as_sampled=True))
    np.testing.assert_allclose(elsewhere.rewards, given.rewards, atol=1e-4)
    with rb.RewardModel(saved.path) as back:
        np.testing.assert_allclose(back.scores(unseen), scores, atol=1e-4)


def backwards(rows: list[dict[str, Any]], session: Any) -> Any:
    texts = [{"prompt": row["prompt"], "completion": row["label"][::-1]} for row in rows]
    return rb.data.demonstrations(texts, session)


def learned(session: Any, rows: list[dict[str, Any]], steps: int) -> float:
    """Greedy accuracy on unseen pictures behind so many steps on rows."""
    for step in range(steps):
        part = [rows[(recipe.prompts_per_step * step + i) % len(rows)] for i in range(recipe.prompts_per_step)]
        rollouts = session.rollout(part, n=recipe.n, max_tokens=8, seed=step, progress=False)
        session.train_step(rollouts.score(rb.tiny.vision_reward).batch(rb.rl.group_normalized()))
        session.sync_weights()
    unseen = rb.tiny.vision_prompts(200, "eval")
    return float(session.evaluate(unseen, rb.tiny.vision_reward, max_tokens=8, progress=False).reward)


def test_the_task_is_learned_and_with_shuffled_pictures_it_is_not(seeing: Any) -> None:
    start, rows = seeing.snapshot(), rb.tiny.vision_prompts(960)
    pictures = [row["prompt"] for row in rows]
    random.Random(0).shuffle(pictures)
    shuffled = [{"prompt": prompt, "label": row["label"]} for prompt, row in zip(pictures, rows, strict=True)]
    assert learned(seeing, shuffled, STEPS // 2) < 0.7
    seeing.restore(start)
    seeing.sync_weights()
    assert learned(seeing, rows, STEPS) >= 0.9
