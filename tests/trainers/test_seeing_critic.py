"""A critic that sees: its values are those of transformers' backbone on each sequence alone, with its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModel, AutoProcessor

from rlbench.errors import BuildError
from rlbench.strategies import FSDPV2Strategy
from rlbench.trainers.models.reward_heads import make_reward_model
from rlbench.trainers.models.value_model import make_critic, values_of
from tests.ranks import ranks
from tests.trainers.seeing import on_meta, pictures, save_eyes, with_pictures

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


def test_a_reward_model_on_the_ranks_that_would_not_see_is_refused(eyes: str) -> None:
    with pytest.raises(BuildError, match=r"sees images.*rb\.RewardModel"):
        make_reward_model(eyes, seed=1)
