"""A critic that sees: its values are those of transformers' backbone on each sequence alone, with its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModel, AutoProcessor

from rlbench.data.prompts.images import counted_from
from rlbench.errors import DataError
from rlbench.strategies import FSDPV2Strategy
from rlbench.trainers.models.reward_heads import make_reward_model, scores_of
from rlbench.trainers.models.value_model import make_critic, values_of
from tests.ranks import ranks
from tests.trainers.seeing import on_meta, pictures, save_eyes, with_observed, with_pictures

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_eyes(tmp_path_factory.mktemp("eyes"))


@pytest.fixture(scope="module")
def engine(eyes: str) -> Any:
    with ranks(2, on_meta(eyes)) as made:
        yield made


def by_hand(backbone: Any, head: torch.Tensor, path: str, given: Any) -> torch.Tensor:
    """Values before each response token by transformers, one sequence at a time."""
    reader, found = AutoImageProcessor.from_pretrained(path), []
    for prompt, response, images in zip(given.prompts, given.responses, given.images, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        seen = {}
        if images:
            seen = dict(reader(images=[image.pil() for image in images], return_tensors="pt"))
            seen["mm_token_type_ids"] = (ids == backbone.config.image_token_id).int()
        states = backbone(input_ids=ids, **seen).last_hidden_state[0]
        found.append((states @ head[0])[len(prompt) - 1 : -1])
    return torch.cat(found)


def test_values_and_gradients_are_those_of_transformers_packed_and_padded_on_one_rank_and_two(
    eyes: str, engine: Any
) -> None:
    a, b = pictures(2)
    given = with_pictures(eyes, [[a], [], [a, b], []])

    def made() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        found = {}
        for packed in (True, False):
            critic = strategy.prepare_model(make_critic(eyes, seed=3), is_training=True)
            own = given.rows([0, 2]) if rank == 0 else given.rows([1, 3])  # pictures on one rank alone
            values = values_of(critic, own, CPU, packed)
            values.square().sum().backward()
            patches = critic.model.visual.patch_embed.proj.weight.grad
            found[packed] = values.detach(), patches.full_tensor(), critic.score.weight.full_tensor()
        return found

    backbone = AutoModel.from_pretrained(eyes)
    results = engine.run(made)
    head = results[0][True][2]
    expected = by_hand(backbone, head, eyes, given)
    (expected.square().sum() / 2).backward()  # FSDP takes the mean over two ranks
    patches = backbone.visual.patch_embed.proj.weight.grad
    rows = torch.split(expected.detach(), given.response_lengths.tolist())
    assert patches.abs().max() > 1e-6 and float(expected.detach().std()) > 0.01
    for found, own in zip(results, ((0, 2), (1, 3)), strict=True):
        wanted = torch.cat([rows[row] for row in own])
        for values, gradient, _ in found.values():
            torch.testing.assert_close(values, wanted, rtol=0, atol=1e-5)
            torch.testing.assert_close(gradient, patches, rtol=0, atol=1e-5)


def test_it_sees_what_a_picture_shows_and_comes_back_from_its_folder(eyes: str, engine: Any, tmp_path: Path) -> None:
    a, _, b = pictures(3)
    given, other = (with_pictures(eyes, [[image], []]) for image in (a, b))

    def made() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        critic = strategy.prepare_model(make_critic(eyes, seed=3), is_training=True)
        strategy.save_model(critic, AutoProcessor.from_pretrained(eyes), str(tmp_path / "critic"))
        again = strategy.prepare_model(make_critic(str(tmp_path / "critic"), seed=99), is_training=True)
        pairs = (critic, given), (critic, other), (again, given)
        return [values_of(one, batch, CPU, True).detach() for one, batch in pairs]

    mine, others, again = engine.run(made)[0]
    shown = int(given.response_lengths[0])
    assert not torch.isclose(mine[:shown], others[:shown], atol=1e-6).any()
    assert torch.equal(mine[shown:], others[shown:])
    torch.testing.assert_close(again, mine, rtol=0, atol=0)


def test_scores_of_a_reward_model_are_those_of_transformers_with_the_pictures(eyes: str, engine: Any) -> None:
    a, b = pictures(2)
    given = with_observed(eyes, with_pictures(eyes, [[a], [], [a, b], []]), [[(b, 2)], [], [(b, 0), (a, 3)], []])
    whole = [[*p.tolist(), *r.tolist()] for p, r in zip(given.prompts, given.responses, strict=True)]

    def made() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        model = strategy.prepare_model(make_reward_model(eyes, seed=3), is_training=False)
        own = (0, 2) if rank == 0 else (1, 3)  # pictures on one rank alone
        scores = [
            scores_of(model, [whole[row] for row in own], strategy, size, [images[row] for row in own])
            for size in (1, 8)
        ]
        blind = scores_of(model, [whole[1]], strategy)
        return scores, blind, model.score.weight.full_tensor()

    images = [counted_from(own, -len(prompt)) for own, prompt in zip(given.images, given.prompts, strict=True)]
    results = engine.run(made)
    backbone, head = AutoModel.from_pretrained(eyes), results[0][2][0]
    reader, expected = AutoImageProcessor.from_pretrained(eyes), []
    for ids, shown in zip(whole, given.images, strict=True):
        row = torch.tensor([ids])
        seen = dict(reader(images=[one.pil() for one in shown], return_tensors="pt")) if shown else {}
        kinds = {"mm_token_type_ids": (row == backbone.config.image_token_id).int()} if shown else {}
        with torch.no_grad():
            expected.append(float(backbone(input_ids=row, **seen, **kinds).last_hidden_state[0, -1] @ head))
    for (scores, blind, _), own in zip(results, ((0, 2), (1, 3)), strict=True):
        for found in scores:
            torch.testing.assert_close(found, torch.tensor([expected[row] for row in own]), rtol=0, atol=1e-5)
        assert float(blind[0]) == pytest.approx(expected[1], abs=1e-5)


def test_samples_of_a_trainer_are_scored_with_their_prompts_pictures(eyes: str, engine: Any) -> None:
    a, _, b = pictures(3)
    given = with_pictures(eyes, [[a], [b], []])

    def made() -> Any:
        from rlbench.data.prompts.prompt import Prompt
        from rlbench.trainers.experience.model_stage import ModelStage
        from rlbench.trainers.experience.reward_stage import RewardStage
        from rlbench.trainers.experience.samples import rollouts_of
        from tests.trainers.making import TableEngine

        strategy = FSDPV2Strategy(bf16=False)
        model = strategy.prepare_model(make_reward_model(eyes, seed=3), is_training=False)
        own = given.rows([0, 1]) if rank == 0 else given.rows([2])
        prompts = [Prompt(p.tolist(), images=i) for p, i in zip(own.prompts, own.images, strict=True)]
        sampling = {"n": 2, "max_tokens": 9, "temperature": 1.0}
        rollouts = rollouts_of(prompts, [p.content for p in prompts], TableEngine()(sampling, prompts), sampling)
        stage = RewardStage(model, None, None, None, None)
        scored = stage.score(rollouts, ModelStage(strategy, 2, False, None), None, strategy.control)
        pairs = zip(rollouts.group, rollouts.responses, strict=True)
        whole = [[*rollouts.prompt_ids[g].tolist(), *r.tolist()] for g, r in pairs]
        strategy.reload_model(model)
        shown = [prompts[g].images for g in rollouts.group]
        others = [(b,) if images else images for images in shown]
        return scored.rewards, *(scores_of(model, whole, strategy, media=seen).numpy() for seen in (shown, others))

    (rewards, expected, others), (texts, alone, _) = engine.run(made)
    assert rewards == pytest.approx(expected, abs=1e-5) and texts == pytest.approx(alone, abs=1e-5)
    assert len(rewards) == 4 and np.abs(expected[:2] - others[:2]).min() > 1e-5, "the picture counts"


def test_what_a_reward_model_cannot_see_is_refused_and_the_ranks_go_on(eyes: str, qwen: str, engine: Any) -> None:
    (a,) = pictures(1)
    given = with_pictures(eyes, [[a], []])
    ids, images = [*given.prompts[0].tolist(), 7], given.images[0]

    def made() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        sees = strategy.prepare_model(make_reward_model(eyes, seed=3), is_training=False)
        blind = strategy.prepare_model(make_reward_model(qwen, seed=3), is_training=False)
        said = []
        for model, row, shown in ((sees, ids, images * 2), (blind, [5, 6, 7], images)):
            try:
                scores_of(model, [row], strategy, media=[shown])
            except DataError as error:
                said.append(str(error))
        return said, scores_of(sees, [ids], strategy, media=[images]).isfinite().all().item()

    for said, finite in engine.run(made):
        assert "its 2 images" in said[0] and "sees none" in said[1] and finite
