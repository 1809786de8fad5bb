"""RLite's `post_generation_hook`, as it is written there, on a conversation of plain texts, messages or token ids."""

import threading

import pytest

from rlbench.data import Prompt
from rlbench.envs import IndexedGenerationHistory, Turn, from_hook
from rlbench.errors import DataError
from tests.envs.making import post_generation_hook


def begun(hook, content="What?", timeout_s=0.3):
    env = from_hook(hook, timeout_s)
    env.reset(Prompt(content))
    return env


def said(env, text, context, number=0):
    ids = [1] * len(text)
    return env.step(Turn(number, text, ids, "stop", False, Prompt("What?"), [], [*context, *ids]))


def test_the_sketch_rolls_out_twice():
    env = begun(post_generation_hook)
    first = said(env, " This", [5] * 5)
    assert not first.done and first.observation is None  # nothing but its own words: the policy goes on
    assert env.history.inputs == ["What?", "What? This"]
    assert env.history.outputs[0].prompt == "What?" and env.history.outputs[0].prompt_token_ids == [5] * 5
    assert said(env, " that", [5] * 10, 1).done


def more(generation, text):
    return IndexedGenerationHistory(0, [*generation.inputs, text], generation.outputs)


def test_what_follows_the_answer_is_the_observation_in_each_kind_of_input():
    text = begun(lambda g, i, o: i.put(more(g, g.inputs[-1] + g.outputs[-1].outputs[0].text + " 3.")))
    assert said(text, " 1+2=", [5]).observation == " 3."
    as_dict = begun(lambda g, i, o: i.put(more(g, {"prompt": g.inputs[-1] + g.outputs[-1].outputs[0].text + "!"})))
    assert said(as_dict, "x", [5]).observation == "!"
    ids = begun(lambda g, i, o: i.put(more(g, {"prompt_token_ids": [5, 1, 8, 9]})), [5])
    assert said(ids, "x", [5]).observation == [8, 9]

    def in_chat(g, i, o):
        answer = {"role": "assistant", "content": g.outputs[-1].outputs[0].text}
        i.put(more(g, [*g.inputs[-1], answer, {"role": "user", "content": "sure?"}]))

    chat = begun(in_chat, [{"role": "user", "content": "hi"}])
    assert said(chat, "x", [5]).observation == [{"role": "user", "content": "sure?"}]


def test_an_async_hook_and_one_that_answers_later():
    async def hook(generation, input_queue, output_queue):
        threading.Timer(0.1, output_queue.put, (generation,)).start()

    assert said(begun(hook), "x", [5]).done


@pytest.mark.parametrize(
    ("hook", "match"),
    [
        (lambda g, i, o: None, "into either queue within 0.3 s"),
        (lambda g, i, o: i.put(more(g, "Another question")), "never encoded again"),
        (lambda g, i, o: i.put(g), "append the next one"),
        (lambda g, i, o: i.put(more(g, [9, 9, 9])), "never encoded again"),
    ],
)
def test_what_would_hang_or_encode_sampled_tokens_again_is_refused(hook, match):
    with pytest.raises(DataError, match=match):
        said(begun(hook), "x", [5])


def test_no_function_is_refused():
    with pytest.raises(DataError, match="wanted a function"):
        from_hook(3)
