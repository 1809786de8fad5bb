"""Sessions of other models that see than "tiny-vision": the whole round, with the proof of a sync over the tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import BuildError, DataError
from rlbench.trainers.ppo.spmd_trainer import SPMDPPOTrainerVL
from tests.session.session_trainers import OPTIONS
from tests.trainers.seeing import FAMILIES, save_eyes
from tests.watching import file_of, moving

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


class Again(rb.envs.Env):
    """Shows another picture after the first answer, or says a word where the prompt had none."""

    def __init__(self, pictures: list[Any]) -> None:
        self.pictures = pictures

    def step(self, turn: Any) -> rb.envs.Step:
        if turn.number or not turn.prompt.images:
            return rb.envs.Step("and now?", done=turn.number == 1)
        other = self.pictures[len(turn.text) % len(self.pictures)]
        return rb.envs.Step([{"type": "image", "image": other}, {"type": "text", "text": "and this?"}])


def test_pictures_that_an_environment_shows_are_rolled_out_trained_on_forked_and_kept(
    cluster: Any, tmp_path: Path
) -> None:
    asked = [*rb.tiny.vision_prompts(3), {"prompt": [{"role": "user", "content": "what?"}]}]
    shown = [rb.data.EncodedImage.from_any(np.full((84, 56, 3), i * 60, np.uint8)) for i in range(3)]
    with rb.Session(save_eyes(tmp_path), train=rb.Train(lr=1e-3)) as session:
        rollouts = session.rollout(asked, n=4, max_tokens=9, seed=1, env=Again(shown), max_turns=2, ignore_eos=True)
        assert not rollouts.env_errors and rollouts.finish.tolist() == [1] * 16
        assert [len(own) for own in rollouts.observed_images] == [1] * 12 + [0] * 4
        assert {own[0].digest for own in rollouts.observed_images if own} <= {image.digest for image in shown}
        scored = rollouts.score(lambda rollout: float(len(rollout.text) % 2) + len(rollout.observed_images))
        batch = scored.batch(rb.rl.group_normalized())
        assert [len(images) for images in batch.images] == [2] * 12 + [0] * 4
        assert session.preflight(batch, strict=True).passed
        before = session.logprobs(batch)
        assert np.abs(before - rollouts.logprobs)[batch.mask].max() < 1e-4, "the sampler saw the same"
        whole = [[*r.prompt_token_ids.tolist(), *r.token_ids] for r in rollouts.flat]
        again = session.inference.logprobs(whole[:4], [r.all_images for r in list(rollouts.flat)[:4]])
        for i, own in enumerate(again):
            given = rollouts.responses.with_values(rollouts.logprobs)[i]
            assert np.abs(own[-len(given) :] - given)[masks(rollouts)[i]].max() < 1e-4
        session.train_step(batch)
        assert np.abs(session.logprobs(batch) - before).max() > 1e-4
        assert session.sync_weights().gap < 1e-4

        at = int(np.flatnonzero(masks(rollouts)[0])[-3])  # in the turn after the picture
        tree = scored.fork(0, at=at, n=3)
        assert [len(own) for own in tree.observed_images[4:7]] == [1] * 3 and tree.rewards[4] >= 1
        assert tree.responses[4][:at].tolist() == rollouts.responses[0][:at].tolist()
        early = scored.fork(0, at=2, n=1)
        assert early.observed_images[4] == () and len(early.observed_images[0]) == 1
        with pytest.raises(DataError, match="inside of an image"):
            scored.fork(0, at=rollouts.observed_images[0][0].at + 1, n=1, text="x")
        kept = rb.Rollouts.from_parquet(tree.to_parquet(tmp_path / "tree.parquet"))
        assert kept.observed_images == tree.observed_images
        session.undo()
        np.testing.assert_array_equal(session.logprobs(batch), before)
        watches(session, tmp_path)


def watches(session: Any, tmp_path: Path) -> None:
    """The whole round of a session on videos: one beside a picture, a file of which half the frames are taken, and an
    environment that answers in text."""
    session.sync_weights()
    picture = rb.tiny.vision_prompts(1)[0]["prompt"][0]["content"][0]
    what, clip = {"type": "text", "text": "what?"}, {"type": "video", "video": moving(6), "fps": 3.0}
    file = {"type": "video", "video": file_of(moving(8, seed=4), 4.0), "num_frames": 4}
    contents = [[clip, what], [picture, clip, what], [file, what], [what]]
    asked = [{"prompt": [{"role": "user", "content": parts}], "label": "r"} for parts in contents]
    rollouts = session.rollout(asked, n=4, max_tokens=6, seed=1)
    batch = rollouts.score(watched).batch(rb.rl.group_normalized())
    assert [len(own) for own in batch.videos] == [1] * 12 + [0] * 4 and batch.media == ("images", "videos")
    assert session.preflight(batch, strict=True).passed
    before = session.logprobs(batch)
    assert np.abs(before - rollouts.logprobs).max() < 1e-5, "the sampler watched the same"
    whole = [[*r.prompt_token_ids.tolist(), *r.token_ids] for r in rollouts.flat][4:5]
    (again,) = session.inference.logprobs(whole, [rollouts[1][0].images], videos=[rollouts[1][0].videos])
    given = rollouts.responses.with_values(rollouts.logprobs)[4]
    assert again[-len(given) :] == pytest.approx(given, abs=1e-5)
    other = batch.replace(videos=tuple(tuple(slower(one) for one in own) for own in batch.videos))
    assert np.abs(session.logprobs(other) - before).max() > 1e-4, "the rate of its frames tells"

    turns = session.rollout(asked[:1], n=2, max_tokens=4, env=Again([]), max_turns=2, ignore_eos=True)
    assert not turns.env_errors and turns.score(watched).batch(rb.rl.group_normalized()).media == ("videos",)
    session.train_step(batch)
    assert np.abs(session.logprobs(batch) - before).max() > 1e-4
    assert session.sync_weights().gap < 1e-4
    tree = rollouts.score(watched).fork(4, at=1, n=2)
    assert tree.prompts[1].videos == rollouts.prompts[1].videos and tree.samples == rollouts.samples + 2
    kept = rb.Rollouts.from_parquet(tree.to_parquet(tmp_path / "watched.parquet"))
    assert [p.videos for p in kept.prompts] == [p.videos for p in tree.prompts]
    assert kept.prompts[2].videos[0].sampling.num_frames == 4

    stream = rb.data.PromptSet.of(rb.data.as_prompts(asked * 2)).stream(seed=3)
    trainer = session.trainer("grpo", stream, watched, trainer_class=SPMDPPOTrainerVL, **OPTIONS)
    (made,) = trainer.fit(1)
    assert np.isfinite(made["policy_loss"]) and made["mismatch/kl"] < 1e-6


def watched(rollout: Any) -> float:
    return float(len(rollout.text) % 2) + len(rollout.videos)


def slower(video: rb.data.EncodedVideo) -> rb.data.EncodedVideo:
    frames = video.pixels(range(video.frames)), video.fps / 4
    return rb.data.EncodedVideo.from_any({"video": frames, **video.sampling.asked})


def masks(rollouts: Any) -> Any:
    return rollouts.responses.with_values(rollouts.mask)


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
