"""Dynamic sampling draws again until there are as many groups that teach something as were asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlbench.data.prompts.prompt import Prompt
from rlbench.errors import DataError
from rlbench.strategies import get_fake_strategy
from rlbench.strategies.options.config import OptionError, StrategyConfig
from rlbench.trainers.experience.dynamic_sampling import _kept
from tests.data.values import rollouts
from tests.trainers.making import TableEngine, asked, joined, last_token, maker_of, qwen_of

OPTIONS = {"dynamic_sampling": True}


@pytest.fixture
def fake() -> Any:
    return get_fake_strategy({"bf16": False})


@pytest.fixture(scope="module")
def actor(qwen: str) -> Any:
    return qwen_of(qwen)


def teaches(prompt: Prompt) -> bool:
    """Which prompts have samples that differ: those whose first token is even."""
    return prompt.content[0] % 2 == 0


def reward(rollout: Any) -> float:
    return last_token(rollout) if teaches(rollout.source) else 1.0


class Stream:
    """Further prompts, and how many were asked for each time."""

    def __init__(self, seed: int = 50) -> None:
        self.prompts, self.counts = iter(asked(1000, seed=seed)), []

    def __call__(self, count: int) -> list[Prompt]:
        self.counts.append(count)
        return [next(self.prompts) for _ in range(count)]


def test_groups_that_teach_nothing_are_replaced_by_further_prompts(fake: Any, actor: Any) -> None:
    """Defect absent: they were masked, the batch shrank, and a masked row made the loss NaN."""
    maker, more, prompts = maker_of(fake, actor, reward, OPTIONS), Stream(), asked(6)
    made = joined(maker.make_experience_list(prompts, more_prompts=more))
    drawn = [p for call in fake.gather_and_generate.calls for p in call["prompts"]]
    good = [p for p in drawn if teaches(p)]
    assert any(not teaches(p) for p in prompts) and len(fake.gather_and_generate.calls) > 1
    assert [made.prompts[i] for i in range(0, len(made), 4)] == good[:6]
    assert made.batch.group.tolist() == np.repeat(np.arange(6), 4).tolist()
    for number in range(6):
        assert np.ptp(made.batch.rewards[made.batch.group == number]) > 0
    assert made.batch.mask.all()
    m = maker.metrics
    assert m["dynamic_sampling/generations"] == 1 + len(more.counts)
    assert m["dynamic_sampling/groups"] == len(drawn) and m["dynamic_sampling/with_signal"] == len(good)
    assert m["dynamic_sampling/spare"] == len(good) - 6
    assert maker.metrics["step_reward_mean"] == pytest.approx(made.batch.rewards.mean())


def test_a_response_that_was_cut_makes_no_group_teach_something(fake: Any, actor: Any) -> None:
    """A group of equal rewards and a cut one is replaced; one that teaches keeps its cut one, which says nothing."""

    class Interrupted(TableEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
            drawn = super().__call__(*args, **kwargs)
            return [replace(one, finish_reason="abort") if i % 4 == 1 else one for i, one in enumerate(drawn)]

    fake.gather_and_generate = Interrupted()
    of_a_group = lambda r: 5.0 if r.finish_reason == "abort" else reward(r)  # noqa: E731
    made = joined(maker_of(fake, actor, of_a_group, OPTIONS).make_experience_list(asked(6), more_prompts=Stream()))
    assert len(fake.gather_and_generate.calls) > 1 and len(made) == 24
    assert made.trained.tolist() == [i % 4 != 1 for i in range(24)]
    for number in range(6):
        assert np.ptp(made.batch.rewards[(made.batch.group == number) & made.trained]) > 0


def test_a_batch_that_teaches_everywhere_is_drawn_once(fake: Any, actor: Any) -> None:
    more = Stream()
    maker = maker_of(fake, actor, last_token, OPTIONS)
    maker.make_experience_list(asked(3), more_prompts=more)
    assert more.counts == [] and maker.metrics["dynamic_sampling/generations"] == 1


def test_it_gives_up_after_so_many_generations_and_says_how_many_had_a_signal(fake: Any, actor: Any) -> None:
    maker = maker_of(fake, actor, lambda r: 1.0, {**OPTIONS, "max_num_gen_batches": 3})
    with pytest.raises(DataError, match="0 of 6 groups"):
        maker.make_experience_list(asked(2), more_prompts=Stream())
    assert len(fake.gather_and_generate.calls) == 3 and maker.state()["groups"] == 0


def test_zero_never_gives_up(fake: Any, actor: Any) -> None:
    calls: list[int] = []

    def late(rollout: Any) -> float:
        return last_token(rollout) if len(fake.gather_and_generate.calls) > 15 else 1.0

    maker = maker_of(fake, actor, late, {**OPTIONS, "max_num_gen_batches": 0})
    maker.make_experience_list(asked(1), more_prompts=lambda n: calls.append(n) or asked(n, seed=len(calls)))
    assert len(calls) >= 15


def test_the_metric_may_be_a_component_of_the_reward(fake: Any, actor: Any) -> None:
    """Two rewards of one accuracy differ by a bonus: they teach as rewards, and nothing as acc."""

    def graded(rollout: Any) -> dict[str, float]:
        return {"reward": 1.0 + 0.01 * last_token(rollout), "acc": reward(rollout)}

    maker = maker_of(fake, actor, graded, {**OPTIONS, "dynamic_sampling_metric": "acc"})
    made = joined(maker.make_experience_list(asked(6), more_prompts=Stream()))
    assert all(teaches(prompt) for prompt in made.prompts)
    by_reward = maker_of(fake, actor, graded, OPTIONS)
    by_reward.make_experience_list(asked(6), more_prompts=Stream())
    assert by_reward.metrics["dynamic_sampling/generations"] == 1


def test_a_component_called_reward_does_not_stand_for_the_reward() -> None:
    scored = replace(rollouts().score([0, 1, 0, 1, 1, 1]), components={"reward": np.array([1.0, 1, 0, 1, 1, 1])})
    assert np.unique(_kept(scored, StrategyConfig(dynamic_sampling=True)).group).tolist() == [0, 1]


def test_a_metric_that_the_rewards_do_not_have_is_named(fake: Any, actor: Any) -> None:
    maker = maker_of(fake, actor, last_token, {**OPTIONS, "dynamic_sampling_metric": "acc"})
    with pytest.raises(DataError, match=r"no component.*there are reward, rule_reward"):
        maker.make_experience_list(asked(2), more_prompts=Stream())


@pytest.mark.parametrize(
    ("more", "kind", "said"),
    [
        (None, DataError, "give more_prompts"),
        (lambda n: [], DataError, "2 further prompts were wanted, more_prompts gave 0"),
        (lambda n: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_without_further_prompts_it_is_refused(fake: Any, actor: Any, more: Any, kind: Any, said: str) -> None:
    maker = maker_of(fake, actor, lambda r: 1.0, OPTIONS)
    with pytest.raises(kind, match=said):
        maker.make_experience_list(asked(2), more_prompts=more)


def test_no_more_groups_are_trained_on_than_were_asked_for(fake: Any, actor: Any) -> None:
    """One group of six is to be replaced; the two that were drawn for it both teach, and the second is left over."""
    dull = asked(6)[3].content
    maker = maker_of(fake, actor, lambda r: 1.0 if r.prompt == dull else last_token(r), OPTIONS)
    made = joined(maker.make_experience_list(asked(6), more_prompts=Stream()))
    assert len(made) == 24 and maker.metrics["dynamic_sampling/spare"] == 1
    assert maker.state()["groups"] == 6


def test_samples_of_a_prompt_are_needed_to_compare(fake: Any, actor: Any) -> None:
    with pytest.raises(OptionError, match="2 or more"):
        maker_of(fake, actor, options={**OPTIONS, "n": 1, "advantage_estimator": "reinforce"})


def test_a_generation_of_which_all_was_cut_has_no_components_and_is_drawn_again(fake: Any, actor: Any) -> None:
    class CutAtFirst(TableEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
            drawn = super().__call__(*args, **kwargs)
            return [replace(one, finish_reason="abort") for one in drawn] if len(self.calls) == 1 else drawn

    fake.gather_and_generate = CutAtFirst()
    graded = lambda rollout: {"reward": last_token(rollout), "acc": last_token(rollout)}  # noqa: E731
    maker = maker_of(fake, actor, graded, {**OPTIONS, "dynamic_sampling_metric": "acc"})
    made = joined(maker.make_experience_list(asked(3), more_prompts=Stream()))
    assert len(fake.gather_and_generate.calls) > 1
    assert len(made) == 12 and made.trained.all() and np.isfinite(made.components["acc"]).all()
