"""The generated task: seeded, split for good, and scored exactly."""

from types import SimpleNamespace

import pytest

from rlbench.errors import DataError
from rlbench.tiny import tasks


def digits_of(prompts):
    return {prompt[-1]["content"].removeprefix("sort ") for prompt in prompts}


def test_prompts_follow_the_seed_and_do_not_repeat():
    first = tasks.prompts(300, "train", seed=1)
    assert first == tasks.prompts(300, "train", seed=1)
    assert first[:100] == tasks.prompts(100, "train", seed=1)
    assert len(digits_of(first)) == 300
    assert len(digits_of(first) & digits_of(tasks.prompts(300, "train", seed=2))) < 30


def test_train_and_eval_are_disjoint_whatever_the_seed():
    train = set().union(*(digits_of(tasks.prompts(1000, "train", seed)) for seed in range(5)))
    held_out = set().union(*(digits_of(tasks.prompts(1000, "eval", seed)) for seed in range(5)))
    assert len(train) > 4000
    assert not train & held_out


def test_reward_is_one_for_the_right_answer_alone():
    prompt = [{"role": "user", "content": "sort 520143"}]

    def reward(text):
        return tasks.reward(SimpleNamespace(prompt=prompt, text=text))

    assert tasks.answer(prompt) == "012345"
    assert reward("012345") == 1.0
    for wrong in ("543210", "520143", "012345 ", " 012345", "01234", "0123456", "012345\n", "", "12345"):
        assert reward(wrong) == 0.0


def test_reward_reads_prompts_as_text_messages_or_value():
    value = SimpleNamespace(content=[{"role": "system", "content": "be right"}, *tasks.message("9081")])
    for prompt in ("sort 9081", tasks.message("9081"), value):
        assert tasks.reward(SimpleNamespace(prompt=prompt, text="0189")) == 1.0
        assert tasks.reward(SimpleNamespace(prompt=prompt, text="9810")) == 0.0


def test_bad_questions_are_refused():
    for wrong in ("add 1 2", "sort", "sort 12 34", "resort 12", [], [1, 2, 3]):
        with pytest.raises(DataError, match="sort 52143"):
            tasks.answer(wrong)
    with pytest.raises(DataError, match="train, eval"):
        tasks.prompts(3, "test")
    with pytest.raises(DataError, match="at least 1"):
        tasks.prompts(0)
