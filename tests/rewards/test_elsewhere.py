"""Rewards written for TRL and verl, as they are: recognised by their parameters, given what these systems give them."""

import re

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import DataError
from tests.rewards.values import answers, one

CHAT = [{"role": "user", "content": "what is 3 + 4?"}]
ROW = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 3, "split": "train"},
}


def format_reward_func(completions, **kwargs):  # TRL's own documentation
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.fullmatch(r"<think>.*</think>.*", content) else 0.0 for content in contents]


def accuracy_reward_func(prompts, completions, ground_truth, **kwargs):
    assert len(prompts) == len(completions) == len(ground_truth)
    return [1.0 if completion == truth else 0.0 for completion, truth in zip(completions, ground_truth, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # verl's
    assert data_source == "openai/gsm8k" and extra_info["index"] == 3
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}


def test_trls_function_gets_messages_of_a_chat_and_texts_of_a_text():
    chat = answers("<think>x</think>7", "7", prompt=CHAT)
    assert chat.score(format_reward_func).rewards.tolist() == [1, 0]
    assert answers("7", "8").score(accuracy_reward_func).rewards.tolist() == [1, 0]


def test_trls_function_gets_every_column_of_the_rows_a_list_each_and_the_label_where_no_column_has_it():
    seen = {}

    def reward(prompts, completions, difficulty, answer, **columns):
        seen.update(columns, difficulty=difficulty, answer=answer, prompts=prompts)
        return [0.0] * len(completions)

    answers("a", "b", label="7", meta={"difficulty": 2, "topic": "sums"}).score(reward)
    assert seen.pop("completion_ids") == [list(r.token_ids) for r in answers("a", "b").flat]
    prompts = ["what is 3 + 4?"] * 2
    expected = {"difficulty": [2, 2], "answer": ["7", "7"], "topic": ["sums", "sums"], "label": ["7", "7"]}
    assert seen == {**expected, "prompts": prompts}


def test_rewards_see_the_images_trls_by_name_as_pillows_and_our_own_as_they_travel():
    seen = {}

    def reward(completions, images, image):
        seen.update(images=images, image=image)
        return [float(one.getpixel((0, 0))[0]) for one in image]

    red = np.full((2, 2, 3), (9, 0, 0), np.uint8)
    chat = [{"role": "user", "content": [{"type": "image", "image": red}, {"type": "text", "text": "what?"}]}]
    rollouts = answers("a", "b", prompt=chat)
    assert rollouts.score(reward).rewards.tolist() == [9, 9]
    assert [len(own) for own in seen["images"]] == [1, 1] and seen["image"][0] is seen["images"][1][0]
    assert rollouts.score(lambda rollout: rollout.images[0].width).rewards.tolist() == [2, 2]


def test_verls_function_gets_its_rows_parts_and_its_mapping_becomes_components():
    scored = answers("7", "8", label=None, meta=ROW).score(compute_score)
    assert scored.rewards.tolist() == [1, 0]
    assert {name: values.tolist() for name, values in scored.components.items()} == {"acc": [1, 0]}
    plain = lambda data_source, solution_str, ground_truth, extra_info=None: solution_str == ground_truth  # noqa: E731
    assert answers("7", "8").score(plain).rewards.tolist() == [1, 0], "the label where there is no reward_model"


def test_async_functions_of_both_and_parts_of_a_mixture():
    async def later(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    async def score(data_source, solution_str, ground_truth, extra_info=None):
        return 2.0

    assert answers("ab", "abc").score(later).rewards.tolist() == [2, 3]
    assert answers("ab", "abc").score(score).rewards.tolist() == [2, 2]
    both = rb.rewards.weighted({"right": (accuracy_reward_func, 1.0), "verl": (score, 0.5)})
    assert answers("7", "8").score(both).rewards.tolist() == [2, 1]
    assert both(one("7")).value == 2


def test_options_of_a_call_hold_for_them_too():
    assert answers("7", "8", "7").score(rb.rewards.batched(accuracy_reward_func, size=2)).rewards.tolist() == [1, 0, 1]
    assert answers("7", "8").score(accuracy_reward_func, isolate=True).rewards.tolist() == [1, 0]
    assert answers("7", "8").score(rb.rewards.function(accuracy_reward_func)).rewards.tolist() == [1, 0]


def test_a_column_that_the_rows_do_not_have_is_named_with_those_there_are():
    def reward(completions, rubric):
        return [0.0] * len(completions)

    with pytest.raises(DataError, match=r"takes rubric.*topic"):
        answers("a", meta={"topic": "sums"}).score(reward)


def test_a_function_of_a_rollout_is_none_of_them():
    assert answers("7", "8").score(lambda rollout: float(rollout.text == "7")).rewards.tolist() == [1, 0]
    assert answers("7").score(rb.rewards.exact()).rewards.tolist() == [1]
