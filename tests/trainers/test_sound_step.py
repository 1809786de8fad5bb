"""A step on sounds equals the same step by transformers in one process, however it is split over ranks and packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlbench.data.prompts.placing import IMAGE, SOUND
from rlbench.errors import DataError
from rlbench.trainers.experience.samples import prompts_of
from rlbench.trainers.models.lora import Lora
from rlbench.trainers.models.policy_spec import PolicySpec
from rlbench.weights.names import checkpoint_shapes
from tests.hearing import Plain, on_meta, save_ears, sounds, with_sounds
from tests.ranks import SameRanks, ranks, same_ranks
from tests.trainers.policy_reference import GRPO, assert_gradients, by_hand, forward_backward

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ears(tmp_path_factory.mktemp("ears"), window=2)


@pytest.fixture(scope="module")
def trained(ears: str) -> Iterator[SameRanks]:
    """Ranks around the model that hears, by their number: built once, set back after each test."""
    with same_ranks(lambda: on_meta(ears)) as made:
        yield made


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(1, {}), (1, {"packing": False, "head": "plain"}), (2, {"token_budget": 60}), (2, {"packing": False})],
)
def test_gradient_and_metrics_are_those_of_one_plain_process(
    ears: str, trained: SameRanks, world_size: int, options: dict[str, Any]
) -> None:
    a, b, c = sounds(3)
    given = with_sounds([[a], [], [a, b], [c], [], [b]])
    plain = Plain(ears, given)
    total, expected = by_hand(plain, given, GRPO, "token-mean")
    total.backward()
    assert plain.model.model.audio_tower.conv1.weight.grad.abs().max() > 1e-6
    with trained(world_size) as engine:
        results = forward_backward(engine, given, **options)
        assert_gradients(engine, plain.model, atol=1e-5)
    for name, value in expected.items():
        assert results[0]["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("packing", [True, False])
def test_a_rank_without_sounds_runs_the_tower_with_the_other_and_adds_nothing(
    ears: str, trained: SameRanks, packing: bool
) -> None:
    given = with_sounds([[sounds(1)[0]], []])
    plain = Plain(ears, given)
    by_hand(plain, given, GRPO, "token-mean")[0].backward()
    with trained(2) as engine:
        results = forward_backward(engine, given, packing=packing)
        assert_gradients(engine, plain.model, atol=1e-5)
        forward_backward(engine, given.rows([1]), packing=packing)  # neither has one, one has no row
    assert sorted(len(result["rows"]) for result in results) == [1, 1]


def test_a_placeholder_that_a_policy_sampled_is_a_token_as_others_and_what_cannot_be_heard_is_refused(
    trained: SameRanks, qwen: str
) -> None:
    (sound,) = sounds(1)
    given = with_sounds([[sound], []])
    token, rows = given.prompts[0][2], given.responses.values.copy()
    other = sounds(2)[1]
    with trained(1) as engine:
        for options in ({}, {"packing": False}):
            before = engine.call("policy_forward", given, options)[0]["channels"]["logprobs"].values
            rows[[2, 3]] = token
            sampled = given.replace(responses=given.responses.with_values(rows))
            after = engine.call("policy_forward", sampled, options)[0]["channels"]["logprobs"].values
            assert np.array_equal(before[:2], after[:2]) and np.isfinite(after).all()
            assert not np.array_equal(before, after)
        with pytest.raises(DataError, match=r"sequence 0 has \d+ sound tokens, its 1 sounds \d+"):
            forward_backward(engine, given.replace(sounds=((other,), ())))
        long = type(sound).from_any((np.zeros(3 * 16_000, np.float32), 16_000))
        with pytest.raises(DataError, match="is longer than the 2 s"):
            forward_backward(engine, given.replace(sounds=((long,), ())))
    from tests.modules import qwen_on_meta

    with ranks(1, qwen_on_meta(qwen)) as engine, pytest.raises(DataError, match=r"vocabulary|hears none"):
        forward_backward(engine, given)


def test_sounds_too_short_for_two_tokens_are_put_in_as_others(trained: SameRanks) -> None:
    short = type(sounds(1)[0]).from_any((sounds(1)[0].samples(16_000)[:800], 16_000))
    given = with_sounds([[short], []])
    assert (given.prompts[0] == given.prompts[0][2]).sum() == 1
    with trained(1) as engine:
        packed, padded = (
            engine.call("policy_forward", given, options)[0]["channels"]["logprobs"].values
            for options in ({}, {"packing": False})
        )
        silent = given.replace(sounds=None)
        without = engine.call("policy_forward", silent, {})[0]["channels"]["logprobs"].values
    assert packed == pytest.approx(padded, abs=1e-5) and np.abs(packed - without)[:4].max() > 1e-4


def test_the_reference_systems_slot_for_images_takes_sounds_where_the_actor_hears() -> None:
    asked = [{"role": "user", "content": "<audio>what?"}]
    (sound,) = sounds(1)
    decoded = sound.samples(16_000), 16_000
    prompts = prompts_of([asked, "of text"], None, None, {SOUND: [decoded, None]})
    assert [len(prompt.sounds) for prompt in prompts] == [1, 0] and not prompts[0].images
    assert prompts[0].content[0]["content"][0] == {"type": "audio"}
    with pytest.raises(DataError, match="a tuple: wanted a PIL image"):
        prompts_of([asked], None, None, {IMAGE: [[decoded]]})


def test_adapters_train_in_tower_and_language_model_and_leave_by_the_checkpoints_names(ears: str) -> None:
    given = with_sounds([[sounds(1)[0]], []])
    with ranks(2, PolicySpec(ears, lr=1e-2, lora=Lora(rank=4))) as engine:
        layout = {entry.name for entry in engine.call("weight_layout")[0].entries}
        assert layout == set(checkpoint_shapes(ears))
        forward_backward(engine, given)
        engine.call("policy_optim_step", {})
        forward_backward(engine, given)
        seen = engine.run(adapters_with_gradients)[0]
    assert any(".audio_tower." in name for name in seen) and any(".language_model." in name for name in seen)


def adapters_with_gradients() -> list[str]:
    held = [(n, p.grad) for n, p in module.named_parameters() if "lora_A" in n]  # type: ignore[name-defined]
    return [name for name, gradient in held if gradient is not None and float(gradient.full_tensor().abs().max()) > 0]
