"""Critics and reward models that hear: values, scores, losses and gradients are those of transformers' backbone on each
sequence alone, with its sounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoFeatureExtractor, AutoModel, AutoProcessor

from rlbench import rewards, rl
from rlbench.data.prompts.prompt import Prompt, as_prompts
from rlbench.data.texts.preferences import of_pairs
from rlbench.errors import DataError
from rlbench.rewards.shaped_head import HeadShape
from rlbench.strategies import FSDPV2Strategy
from rlbench.tiny.tokenizer import build_tokenizer
from rlbench.trainers.models.policy_spec import RewardSpec
from rlbench.trainers.models.reward_heads import make_reward_model, scores_of
from rlbench.trainers.models.value_model import make_critic, values_of
from tests.data.written import written
from tests.hearing import features, on_meta, save_ears, sounds, with_sounds
from tests.modules import VOCAB
from tests.ranks import ranks
from tests.trainers.policy_reference import assert_gradients, forward_backward
from tests.trainers.update_reference import fake

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
HELD: list[list[int]] = [[0], [], [0, 1], [2]]


def scores_here(engine: Any, batch: Any) -> np.ndarray:
    """The score at the end of each sequence, by a rank's forward."""
    (part,) = engine.call("policy_forward", batch, {})
    found = dict(zip(part["rows"].tolist(), part["channels"]["scores"], strict=True))
    return np.array([found[row][-1] for row in range(len(batch))])


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ears(tmp_path_factory.mktemp("ears"), window=2)


@pytest.fixture(scope="module")
def backbone(ears: str) -> Any:
    model = AutoModel.from_pretrained(ears)
    model.audio_tower.embed_positions.requires_grad_(False)
    return model


def given() -> Any:
    made = sounds(3)
    return with_sounds([[made[i] for i in own] for own in HELD])


def rows_of(batch: Any) -> list[list[int]]:
    return [[*p.tolist(), *r.tolist()] for p, r in zip(batch.prompts, batch.responses, strict=True)]


def states(backbone: Any, path: str, ids: list[int], heard: Any, layer: int = -1) -> torch.Tensor:
    """(T, width), of one sequence with its sounds."""
    found = backbone(
        torch.tensor([ids]), **features(AutoFeatureExtractor.from_pretrained(path), heard), output_hidden_states=True
    )
    return (found.last_hidden_state if layer == -1 else found.hidden_states[layer])[0]


def pairs() -> Any:
    """The prompts of `given`, each with two responses."""
    batch = given()
    responses = [row for i, r in enumerate(batch.responses) for row in (r, (r[::-1] + 1 + i) % 200)]
    twice = [prompt for prompt in batch.prompts for _ in range(2)]
    made = of_pairs(twice, responses, [np.ones(len(row), bool) for row in responses])
    return made.replace(sounds=tuple(own for own in batch.sounds for _ in range(2)))


def test_a_reward_model_is_trained_by_pairs_with_sounds_and_saved_for_every_door(
    ears: str, backbone: Any, tmp_path: Path
) -> None:
    batch, saved = pairs(), str(tmp_path / "rm")
    with ranks(2, RewardSpec(ears, head_seed=3, lr=1e-2)) as engine:
        head = torch.nn.Parameter(engine.call("whole_state")[0]["score.weight"])
        whole = torch.nn.ModuleDict({"model": backbone, "score": torch.nn.Linear(1, 1, bias=False)})
        whole["score"].weight = head
        seen = torch.stack(
            [
                states(backbone, ears, ids, own)[-1] @ head[0]
                for ids, own in zip(rows_of(batch), batch.sounds, strict=True)
            ]
        )
        expected = -logsigmoid(seen[0::2] - seen[1::2]).mean()
        backbone.zero_grad()
        expected.backward()
        assert backbone.audio_tower.conv1.weight.grad.abs().max() > 1e-7
        for options in ({"token_budget": 120}, {"packing": False}):  # on one rank pairs without sounds
            found = forward_backward(engine, batch, rl.bradley_terry(), **options)[0]
            assert found["metrics"]["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
            assert_gradients(engine, whole, atol=1e-5)
            engine.call("policy_zero_grad")
        forward_backward(engine, batch, rl.bradley_terry(), whole_step=True)
        engine.call("policy_optim_step", {"whole_step": True})
        state = engine.call("whole_state")[0]
        engine.call("export_model", saved, ears, None)
    with ranks(1, RewardSpec(saved)) as again:
        assert all(torch.equal(tensor, state[name]) for name, tensor in again.call("whole_state")[0].items())
        trained = scores_here(again, batch)
    assert np.abs(trained - seen.detach().numpy()).max() > 1e-4
    prompts = [Prompt(p.tolist(), sounds=own) for p, own in zip(given().prompts, given().sounds, strict=True)]
    sampled = replace(
        written(prompts, [["a", "b"]] * 4, tokenizer=saved),
        prompt_ids=given().prompts,
        responses=batch.responses,
        logprobs=np.zeros(batch.tokens, np.float32),
    )
    judge = rewards.model(saved, as_sampled=True, device="cpu", batch_size=3)
    np.testing.assert_allclose(sampled.score(judge).rewards, trained, atol=1e-5)
    silent = replace(sampled, prompts=tuple(Prompt([1, 2, 3]) for _ in prompts), prompt_ids=given().prompts)
    assert np.abs(silent.score(judge).rewards - trained)[[0, 1, 4, 5, 6, 7]].min() > 1e-5, "it hears them"


def test_several_heads_pool_what_a_layer_heard(ears: str, backbone: Any) -> None:
    batch, heads = pairs(), {"tone": 0.75, "pace": 0.25}
    with ranks(1, RewardSpec(ears, head_seed=3, pooling="attention", probing_layer=1, heads=heads)) as engine:
        state = {n: t for n, t in engine.call("whole_state")[0].items() if n.startswith("shaped_score.")}
        found = scores_here(engine, batch)
    width = backbone.config.get_text_config().hidden_size
    head = HeadShape("attention", 1, heads).made(width, 1)
    head.load_state_dict({name.removeprefix("shaped_score."): tensor for name, tensor in state.items()})
    with torch.no_grad():
        each = [
            head.scores(states(backbone, ears, ids, own, 1)[None])[-1]
            for ids, own in zip(rows_of(batch), batch.sounds, strict=True)
        ]
    np.testing.assert_allclose(found, torch.stack(each) @ torch.tensor([0.75, 0.25]), atol=1e-5)


def test_conversations_are_read_by_the_template_with_their_sounds(ears: str, backbone: Any, tmp_path: Path) -> None:
    strategy = fake()
    model = strategy.prepare_model(make_reward_model(ears, seed=3))
    strategy.save_model(model, AutoProcessor.from_pretrained(ears), str(tmp_path / "rm"))
    one, two = sounds(2)
    short = type(one).from_any((one.samples(16_000)[:800], 16_000))  # of one token
    asked = [
        [{"role": "user", "content": [{"type": "audio", "audio": s.data}, {"type": "text", "text": "what?"}]}]
        for s in (one, two, short)
    ]
    rollouts = written(as_prompts([*asked, [{"role": "user", "content": "what?"}]]), [["bell", "a long horn"]] * 4)
    processor, expected = AutoProcessor.from_pretrained(ears), []
    for rollout in rollouts.flat:
        said = processor.apply_chat_template(rollout.messages, tokenize=False)
        waves = [own.samples(16_000) for own in rollout.sounds]
        ids = processor(text=[said], **({"audio": waves, "sampling_rate": 16_000} if waves else {}))["input_ids"][0]
        expected.append(ids)
    hidden = [
        states(backbone, ears, ids, own.sounds)[-1]
        for ids, own in zip(expected, rollouts.flat, strict=True)
        if own.sounds != (short,)
    ]
    wanted = (torch.stack(hidden) @ model.score.weight.detach()[0]).detach().numpy()
    scored = rollouts.score(rewards.model(tmp_path / "rm", device="cpu", batch_size=4)).rewards
    np.testing.assert_allclose(np.delete(scored, [4, 5]), wanted, atol=1e-5)
    alone = rollouts.score(rewards.model(tmp_path / "rm", device="cpu", batch_size=1)).rewards
    np.testing.assert_allclose(alone, scored, atol=1e-5)
    with pytest.raises(DataError, match=r"6 of 8 completions have sounds.*hears none"):
        rollouts.score(rewards.model(rb_text(tmp_path), device="cpu"))


def rb_text(folder: Path) -> str:
    """A classifier of text."""
    from tests.trainers.test_reward_heads import save_classifier

    build_tokenizer(VOCAB).save_pretrained(folder / "text")
    return save_classifier(folder / "text")


def test_values_of_a_critic_and_scores_of_samples_on_two_ranks(ears: str, backbone: Any, qwen: str) -> None:
    batch = given()

    def made() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        own = [0, 3] if rank == 0 else [1]  # type: ignore[name-defined]  # sounds on one rank alone
        found = {}
        for packed in (True, False):
            critic = strategy.prepare_model(make_critic(ears, seed=3), is_training=True)
            values = values_of(critic, batch.rows(own), CPU, packed)
            values.square().sum().backward()
            conv = critic.model.audio_tower.conv1.weight.grad
            found[packed] = values.detach(), conv.full_tensor(), critic.score.weight.full_tensor()
        model = strategy.prepare_model(make_reward_model(ears, seed=3))
        scores = [
            scores_of(model, [whole[row] for row in own], strategy, size, [batch.sounds[row] for row in own])
            for size in (1, 8)
        ]
        blind = strategy.prepare_model(make_reward_model(qwen, seed=3))
        refused = []
        for judge, row, shown in ((model, whole[0], batch.sounds[0] * 2), (blind, [5, 6], batch.sounds[0])):
            try:
                scores_of(judge, [row], strategy, media=[shown])
            except DataError as error:
                refused.append(str(error))
        return found, scores, refused

    whole = rows_of(batch)
    with ranks(2, on_meta(ears)) as engine:
        results = engine.run(made)
    head = results[0][0][True][2]
    values, ends = [], []
    for ids, own, prompt in zip(whole, batch.sounds, batch.prompts, strict=True):
        each = states(backbone, ears, ids, own) @ head[0]
        values.append(each[len(prompt) - 1 : -1])
        ends.append(float(each[-1].detach()))
    backbone.zero_grad()
    (torch.cat([values[i] for i in (0, 3, 1)]).square().sum() / 2).backward()  # FSDP takes the mean over two ranks
    conv = backbone.audio_tower.conv1.weight.grad
    assert conv.abs().max() > 1e-6
    for (found, scores, refused), own in zip(results, ((0, 3), (1,)), strict=True):
        for mine, gradient, _ in found.values():
            torch.testing.assert_close(mine, torch.cat([values[i] for i in own]).detach(), rtol=0, atol=1e-5)
            torch.testing.assert_close(gradient, conv, rtol=0, atol=1e-5)
        for score in scores:
            torch.testing.assert_close(score, torch.tensor([ends[i] for i in own]), rtol=0, atol=1e-5)
        assert "its 2 sounds" in refused[0] and "hears none" in refused[1]


def test_a_critic_of_text_refuses_sounds(qwen: str) -> None:
    strategy = fake()
    critic = strategy.prepare_model(make_critic(qwen, seed=3), is_training=True)
    with pytest.raises(DataError, match=r"prompts have sounds, and the critic .* hears none: make_critic"):
        values_of(critic, given(), CPU, True)
