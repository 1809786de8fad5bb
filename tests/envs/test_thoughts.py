"""Thoughts left out of what later turns see: what the policy is shown then, and what is counted of it."""

from __future__ import annotations

from typing import Any

import pytest

from rlbench.data import Prompt
from rlbench.envs import Env, Step
from rlbench.envs.episode import Episode, Limits
from rlbench.envs.thoughts import without_thoughts
from rlbench.errors import DataError
from rlbench.tiny.tokenizer import build_tokenizer

ASK = [{"role": "user", "content": "sort 21"}]


class Judge(Env):
    def step(self, turn: Any) -> Any:
        return Step("no")


class Inside(Judge):
    role = None


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(512)


def begun(tokenizer: Any, content: Any = ASK, env: type = Judge, thoughts: str = "strip", total: int = 900) -> Episode:
    prompt = Prompt(content)
    ids = rendered(tokenizer, content) if isinstance(content, list) else tokenizer(content)["input_ids"]
    limits = Limits(1000, 9, total, len(tokenizer), thoughts)
    made = Episode(prompt, ids, limits, env, tokenizer, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    made.begin()
    made.opened(None)
    return made


def rendered(tokenizer: Any, messages: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def say(tokenizer: Any, episode: Episode, text: str, observation: Any = "no", ended: bool = True) -> bool:
    ids = [*tokenizer(text)["input_ids"], *([tokenizer.eos_token_id] if ended else [])]
    episode.extend(ids, [-0.5] * len(ids))
    finish = "stop" if ended else "length"
    episode.turn(finish)
    return episode.stepped(Step(observation), finish, ended)


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


NO = {"role": "user", "content": "no"}


def test_a_turn_with_thoughts_is_followed_by_the_conversation_without_them(tokenizer: Any) -> None:
    """As the template renders it whole; a turn without thoughts goes on behind its own tokens."""
    one = begun(tokenizer)
    assert say(tokenizer, one, "<think>1 or 2?</think>\n\n12")
    assert one.contexts == [len(tokenizer("<think>1 or 2?</think>\n\n12")["input_ids"]) + 1]
    assert one.context == rendered(tokenizer, [*ASK, answer("12"), NO])
    before = one.context
    assert say(tokenizer, one, "21") and len(one.contexts) == 1
    assert one.context[: len(before)] == before
    assert one.context == rendered(tokenizer, [*ASK, answer("12"), NO, answer("21"), NO])
    assert say(tokenizer, one, "<think>hm") and len(one.contexts) == 2  # not closed: nothing was answered
    assert one.context == rendered(tokenizer, [*ASK, answer("12"), NO, answer("21"), NO, answer(""), NO])
    assert one.info["contexts"] == one.contexts and one.info["turns"] == 3
    told = [message["content"] for message in one.info["messages"] if message["role"] == "assistant"]
    assert told == ["<think>1 or 2?</think>\n\n12", "21", "<think>hm"]  # a reward reads all of it
    assert sum(one.mask) == sum(len(tokenizer(text)["input_ids"]) + 1 for text in told)


def test_kept_thoughts_change_nothing(tokenizer: Any) -> None:
    one = begun(tokenizer, thoughts="keep")
    say(tokenizer, one, "<think>1</think>12")
    assert one.contexts == [] and "contexts" not in one.info
    assert one.context == rendered(tokenizer, [*ASK, answer("<think>1</think>12"), NO])


def test_a_message_that_goes_on_is_stripped_once_it_has_ended(tokenizer: Any) -> None:
    one = begun(tokenizer)
    assert say(tokenizer, one, "<think>1 or", None, ended=False) and one.contexts == []
    assert say(tokenizer, one, " 2?</think>12")
    assert one.context == rendered(tokenizer, [*ASK, answer("12"), NO])


def test_an_answer_that_the_prompt_begins_goes_on_there(tokenizer: Any) -> None:
    one = begun(tokenizer, [*ASK, answer("it is ")])
    say(tokenizer, one, "<think>1</think>12")
    assert one.context == rendered(tokenizer, [*ASK, answer("it is 12"), NO])


def test_what_is_written_anew_is_not_counted_again(tokenizer: Any) -> None:
    kept, stripped = (begun(tokenizer, thoughts=thoughts, total=60) for thoughts in ("keep", "strip"))
    for one in (kept, stripped):
        say(tokenizer, one, "<think>1</think>12")
    assert kept.room == stripped.room
    assert not say(tokenizer, stripped, "<think>2</think>21", "n" * 60) and stripped.finish == "length"


def test_a_thought_that_the_prompt_opened_ends_where_it_is_closed() -> None:
    assert without_thoughts("hm</think>12") == "12" and without_thoughts("<think>a</think>b<think>c") == "b"


@pytest.mark.parametrize(
    ("content", "env", "match"),
    [("sort 21", Judge, "no chat"), ([5, 6], Judge, "no chat"), (ASK, Inside, "role is None")],
)
def test_what_cannot_be_written_anew_is_refused(tokenizer: Any, content: Any, env: type, match: str) -> None:
    one = Episode(Prompt(content), [5, 6], Limits(100, 3, None, 512, "strip"), env, tokenizer, str)
    one.begin()
    with pytest.raises(DataError, match=match):
        one.opened(None)


def test_observed_token_ids_are_refused(tokenizer: Any) -> None:
    one = begun(tokenizer)
    with pytest.raises(DataError, match=r"token ids.*thoughts='keep'"):
        say(tokenizer, one, "<think>1</think>12", [5, 6])
