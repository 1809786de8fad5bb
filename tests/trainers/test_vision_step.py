"""A step on images equals the same step by transformers in one process, however it is split over ranks and packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlbench.data.base.ragged import Ragged
from rlbench.data.prompts.images import PlacedImage
from rlbench.errors import DataError
from rlbench.options import OptionError
from rlbench.trainers.models.lora import Lora
from rlbench.trainers.models.policy_spec import PolicySpec
from rlbench.weights.names import checkpoint_shapes
from tests.ranks import SameRanks, ranks, same_ranks
from tests.trainers.policy_reference import GRPO, assert_gradients, by_hand, forward_backward
from tests.trainers.seeing import FAMILIES, Plain, on_meta, pictures, save_eyes, with_observed, with_pictures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_eyes(tmp_path_factory.mktemp("eyes"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_eyes(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def trained(family: str) -> Iterator[SameRanks]:
    """Ranks around a model of the family, by their number: built once, set back after each test."""
    with same_ranks(lambda: on_meta(family)) as made:
        yield made


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(1, {}), (1, {"packing": False, "head": "plain"}), (2, {"token_budget": 40}), (2, {"packing": False})],
)
def test_gradient_and_metrics_are_those_of_one_plain_process(
    family: str, trained: SameRanks, world_size: int, options: dict[str, Any]
) -> None:
    a, b, c = pictures(3)
    given = with_pictures(family, [[a], [], [a, b], [c], [], [b]])
    plain = Plain(family, given)
    total, expected = by_hand(plain, given, GRPO, "token-mean")
    total.backward()
    assert plain.model.model.visual.patch_embed.proj.weight.grad.abs().max() > 1e-5
    with trained(world_size) as engine:
        results = forward_backward(engine, given, **options)
        assert_gradients(engine, plain.model, atol=1e-5)
    for name, value in expected.items():
        assert results[0]["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(1, {}), (1, {"packing": False, "head": "plain"}), (2, {"token_budget": 60}), (2, {"packing": False})],
)
def test_images_that_an_environment_showed_stand_at_their_places(
    family: str, trained: SameRanks, world_size: int, options: dict[str, Any]
) -> None:
    a, b, c = pictures(3)
    asked = with_pictures(family, [[a], [], [a, b], []])
    given = with_observed(family, asked, [[(b, 2)], [(c, 1), (a, 4)], [], []], stray=True)
    assert [len(own) for own in given.images] == [2, 2, 2, 0] and (~given.mask).sum() > 10
    plain = Plain(family, given)
    total, expected = by_hand(plain, given, GRPO, "token-mean")
    total.backward()
    with trained(world_size) as engine:
        results = forward_backward(engine, given, **options)
        assert_gradients(engine, plain.model, atol=1e-5)
    for name, value in expected.items():
        assert results[0]["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("packing", [True, False])
def test_a_rank_without_images_runs_the_tower_with_the_other_and_adds_nothing(
    family: str, trained: SameRanks, packing: bool
) -> None:
    given = with_pictures(family, [[pictures(1)[0]], []])
    plain = Plain(family, given)
    by_hand(plain, given, GRPO, "token-mean")[0].backward()
    with trained(2) as engine:
        results = forward_backward(engine, given, packing=packing)
        assert_gradients(engine, plain.model, atol=1e-5)
        forward_backward(engine, given.rows([1]), packing=packing)  # neither has one, one has no row
    assert sorted(len(result["rows"]) for result in results) == [1, 1]
    assert [result["shared"] for result in results] == [0, 0], "a blank picture is no prompt that rows share"


def test_an_image_token_that_a_policy_sampled_is_a_token_as_others(eyes: str) -> None:
    given = with_pictures(eyes, [[pictures(1)[0]], []])
    token, rows = given.prompts[0][2], given.responses.values.copy()
    assert (given.prompts[0] == token).sum() == 4
    with ranks(1, on_meta(eyes)) as engine:
        before = engine.call("policy_forward", given, {})[0]["channels"]["logprobs"].values
        rows[[2, 3]] = token
        given = given.replace(responses=given.responses.with_values(rows))
        after = engine.call("policy_forward", given, {})[0]["channels"]["logprobs"].values
    assert np.array_equal(before[:2], after[:2]) and np.isfinite(after).all() and not np.array_equal(before, after)


def test_adapters_train_in_tower_and_language_model_and_leave_by_the_checkpoints_names(eyes: str) -> None:
    given = with_pictures(eyes, [[pictures(1)[0]], []])
    spec = PolicySpec(eyes, lr=1e-2, lora=Lora(rank=4))
    with ranks(2, spec) as engine:
        layout = {entry.name for entry in engine.call("weight_layout")[0].entries}
        assert layout == set(checkpoint_shapes(eyes))
        forward_backward(engine, given)
        engine.call("policy_optim_step", {})
        forward_backward(engine, given)
        seen = engine.run(adapters_with_gradients)[0]
    assert any(".visual." in name for name in seen) and any(".language_model." in name for name in seen)


@pytest.mark.parametrize("packing", [True, False])
def test_no_pass_builds_a_cache(family: str, trained: SameRanks, packing: bool) -> None:
    def watch() -> None:
        inner = module.model.language_model  # type: ignore[name-defined]
        noting = inner.register_forward_hook(lambda *args: caches.append(args[-1].past_key_values))  # type: ignore[name-defined]  # noqa: F821
        module.noting = noting  # type: ignore[name-defined]

    given = with_pictures(family, [[pictures(1)[0]], []])
    with trained(1) as engine:
        engine.run("caches = []")
        engine.run(watch)
        forward_backward(engine, given, packing=packing)
        seen = engine.run("caches")[0]
        engine.run("module.noting.remove()")
    assert seen and not any(seen)


def adapters_with_gradients() -> list[str]:
    held = [(n, p.grad) for n, p in module.named_parameters() if "lora_A" in n]
    return [name for name, gradient in held if gradient is not None and float(gradient.full_tensor().abs().max()) > 0]


def test_what_cannot_be_seen_is_refused_before_any_pass(eyes: str, qwen: str) -> None:
    from tests.modules import qwen_on_meta

    given = with_pictures(eyes, [[pictures(1)[0]], []])
    with ranks(1, qwen_on_meta(qwen)) as engine, pytest.raises(DataError, match="vocabulary"):
        forward_backward(engine, given)
    short = given.replace(images=(given.images[0] * 2, ()))
    with ranks(1, on_meta(eyes)) as engine:
        with pytest.raises(OptionError, match="share_prompts=True and prompts with images"):
            forward_backward(engine, given, share_prompts=True)
        with pytest.raises(DataError, match="4 image tokens, its 2 images 8"):
            forward_backward(engine, short)
        for at, token in ((1, "0 image tokens at"), (-4, "image tokens at")):
            wrong = given.replace(images=((*given.images[0], PlacedImage.of(given.images[0][0], at)), ()))
            with pytest.raises(DataError, match=f"sequence 0 has .*{token}"):
                forward_backward(engine, wrong)
        prompt = [int(token) for token in given.prompts[0]]
        run = [token for token in prompt if prompt.count(token) == 4]
        side_by_side = Ragged.from_rows([[*run, *run, *prompt[-2:]], list(given.prompts[1])], np.int32)
        with pytest.raises(DataError, match="2 images in 1 runs"):
            forward_backward(engine, given.replace(prompts=side_by_side, images=(given.images[0] * 2, ())))
        forward_backward(engine, given)


def test_images_stay_with_their_rows(eyes: str, tmp_path: Any) -> None:
    import rlbench as rb

    a, b = pictures(2)
    given = with_pictures(eyes, [[a], [], [a, b]])
    assert given.rows([2, 0]).images == ((a, b), (a,))
    assert given.rows([1]).media == ()
    text = given.rows([1]).replace(images=None)
    joined = rb.data.join(text, given)
    assert joined.images == ((), (a,), (), (a, b))
    again = type(given).from_parquet(given.to_parquet(tmp_path / "batch.parquet"))
    assert again.images == given.images and again.key == given.key != given.replace(images=None).key
    assert again.images[0][0] is again.images[2][0]
    with pytest.raises(DataError, match="images of 1 sequences for 3"):
        given.replace(images=((a,),))
    seen = with_observed(eyes, given, [[], [(b, 2)], [(a, 1)]])
    again = type(seen).from_parquet(seen.to_parquet(tmp_path / "seen.parquet"))
    assert again.images == seen.images == rb.data.join(seen[:1], seen[1:]).images and again.images[1][0].at == 2
    moved = seen.replace(images=(seen.images[0], (PlacedImage.of(b, 1),), seen.images[2]))
    assert again.key == seen.key != moved.key
