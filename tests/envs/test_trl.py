"""TRL's environments, as they are: their methods as tools, rows for `reset`, rewards that read the instance."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from transformers.utils import get_json_schema

import rlbench as rb
from rlbench.data import Prompt
from rlbench.envs import Appended, Turn, from_trl
from rlbench.envs.bridge import opened
from rlbench.envs.trl_instances import MOST_POOLS, Instances, pool
from rlbench.errors import DataError
from tests.envs.playing import begun, play
from tests.envs.trl_guess import ASKED, GuessEnv, call, reward_func
from tests.rewards.values import answers
from tests.workers.tiny_checkpoint import byte_tokenizer

TOKENIZER = byte_tokenizer()


def asked(**columns: Any) -> Prompt:
    return Prompt(ASKED, meta={"secret": 7, **columns})


def told(episode: Any) -> list[Any]:
    """What the environment said, message by message."""
    return [message["content"] for message in episode.messages if message["role"] == "tool"]


def test_the_tools_are_the_public_methods_as_transformers_describes_them():
    env, instance = from_trl(GuessEnv), GuessEnv()
    assert env.schemas() == [get_json_schema(instance.guess), get_json_schema(instance.hint)]
    assert repr(env) == "from_trl(GuessEnv)" and not env.by_prompt


def test_a_sample_is_played_as_trl_plays_it():
    said = ["I look. " + call("guess", number=3), call("hint") + call("guess", number=7), "it is 7"]
    episode = play(from_trl(GuessEnv, reward=reward_func), asked(), said, TOKENIZER)
    tools = [message for message in episode.messages if message["role"] == "tool"]
    assert tools == [
        {"role": "tool", "name": "guess", "content": "too low"},
        {"role": "tool", "name": "hint", "content": "{'parity': 1}"},
        {"role": "tool", "name": "guess", "content": "right"},
    ]
    assert episode.turn_rewards[-1] == 0.5 and episode.info["turns"] == 3 and not episode.errors
    assert [c["name"] for c in episode.info["steps"][1]["tool_calls"]] == ["hint", "guess"]


def test_functions_stand_beside_the_methods_as_trls_tools_do():
    def double(x: int) -> int:
        """
        Double a number.

        Args:
            x: The number.
        """
        return 2 * x

    env = from_trl(GuessEnv, tools=[double])
    assert [tool["function"]["name"] for tool in env.schemas()] == ["double", "guess", "hint"]
    assert env.schemas()[0] == get_json_schema(double)
    said = [call("double", x=3) + call("guess", number=7), "done"]
    assert told(play(env, asked(), said, TOKENIZER)) == ["6", "right"]


def test_reset_gets_the_columns_of_the_row_and_what_it_returns_goes_on_in_the_prompt():
    episode = begun(from_trl(GuessEnv), Prompt(ASKED, label="x", meta={"secret": 3, "level": 2}), TOKENIZER)
    assert episode.env.instance.columns == {"level": 2, "label": "x", "prompt": ASKED}
    text = TOKENIZER.decode(episode.opening)
    assert text == "<|im_start|>user\nGuess. It is below 10.<|im_end|>\n<|im_start|>assistant\n"
    ids = TOKENIZER("7").input_ids
    episode.extend(ids, [-1.0] * len(ids))
    turn = episode.turn("stop")
    assert turn.messages[0] == {"role": "user", "content": "Guess. It is below 10."}
    assert episode.info["asked"] == turn.messages[0] and ASKED[0]["content"] == "Guess. "
    quiet = begun(from_trl(GuessEnv), asked(quiet=True), TOKENIZER)
    assert "asked" not in quiet.info and quiet.opening == quiet.prompt_ids


def test_what_reset_observed_is_in_the_conversation_that_rewards_read():
    info = begun(from_trl(GuessEnv), asked(), TOKENIZER).info | {"messages": [{"role": "assistant", "content": "7"}]}
    rollouts = replace(answers("7", prompt=ASKED), infos=[info])
    assert next(rollouts.flat).messages[0]["content"] == "Guess. It is below 10."
    seen: list[Any] = []

    def reward(prompts, completions):
        seen.extend([prompts, completions])
        return [1.0]

    rollouts.score(reward)
    assert seen == [[[info["asked"]]], [[{"role": "assistant", "content": "7"}]]]


def test_a_prompt_of_text_and_one_of_parts_go_on_too():
    class Seeing(GuessEnv):
        def reset(self, **columns):
            return [{"type": "text", "text": "look"}]

    episode = begun(from_trl(Seeing), Prompt([{"role": "user", "content": [{"type": "text", "text": "a"}]}]), TOKENIZER)
    assert [part["text"] for part in episode.asked["content"]] == ["a", "look"]
    ids = TOKENIZER("a: ").input_ids
    assert TOKENIZER.decode(opened(TOKENIZER, Prompt("a: "), ids, Appended("b"), "tool").ids) == "a: b"
    with pytest.raises(DataError, match="wanted a text, or parts"):
        opened(TOKENIZER, Prompt("a: "), ids, Appended([1]), "tool")


def test_images_that_reset_and_methods_give_are_shown():
    square = Image.new("RGB", (8, 8))
    shown = [{"type": "image", "image": square}, {"type": "text", "text": "the board"}]

    class Drawing(GuessEnv):
        def look(self) -> list:
            """Look."""
            return shown

    chat = Prompt([{"role": "user", "content": [{"type": "image", "image": square}, {"type": "text", "text": "a"}]}])
    begins = opened(TOKENIZER, chat, [1], Appended(shown), "tool")
    assert len(begins.images) == 1 and begins.whole and begins.asked is not None
    assert begins.asked["content"] == [*chat.content[0]["content"], {"type": "image"}, shown[1]]
    episode = begun(from_trl(Drawing), asked(), TOKENIZER)
    step = episode.env.step(Turn(0, call("look"), [1], "stop", False, asked(), [], [1]))
    assert step.observation == [{"role": "tool", "name": "look", "content": shown}]
    assert step.info["tool_calls"][0]["result"] == [{"type": "image"}, shown[1]]


def test_what_goes_wrong_is_told_in_trls_words_and_a_refusal_is_no_fault_of_the_code():
    said = [
        call("guess", number=7),
        call("guess", number=7),
        call("hint", kind="colour"),
        call("gess"),
        call("guess", n=1),
        "over",
    ]
    episode = play(from_trl(GuessEnv, reward=reward_func), asked(), said, TOKENIZER)
    assert told(episode)[:3] == ["right", "{'error': 'Game over.'}", str({"error": "'colour'"})]
    assert all(text.startswith("{'error': ") for text in told(episode)[3:]) and "nearest: guess" in told(episode)[3]
    assert "missing a required argument: 'number'" in told(episode)[4]
    assert [error["where"] for error in episode.errors] == ["tool hint"], "a KeyError is; the ValueError is not"
    assert episode.turn_rewards[-1] == 1.0


def test_thoughts_call_nothing_and_neither_does_the_last_turn_there_can_be():
    thought = play(from_trl(GuessEnv), asked(), [f"<think>{call('guess', number=1)}</think>no"], TOKENIZER)
    assert thought.env.instance.guesses == [] and thought.info["turns"] == 1
    last = play(from_trl(GuessEnv), asked(), [call("guess", number=n) for n in (1, 7)], TOKENIZER, max_turns=2)
    assert last.env.instance.guesses == [1] and last.notes["max_turns"]
    assert play(from_trl(GuessEnv), asked(), [f"<think>{call('guess', number=1)}</think>"], TOKENIZER).errors == []


def test_the_reward_is_of_the_sample_however_it_ends():
    env = from_trl(GuessEnv, reward=lambda env: env.reward)
    short = play(env, asked(), [call("guess", number=7), "7"], TOKENIZER, total=75)
    assert short.finish == "length" and "no_room" in short.notes and short.turn_rewards == [1.0]
    assert "Game" not in str(short.messages)


def test_get_reward_and_functions_are_added_up_and_what_does_not_apply_is_left_out():
    class Own(GuessEnv):
        async def get_reward(self) -> float:
            return 10 * self.reward

    async def later(environments, completions, completion_ids, prompts, secret, level=None):
        assert prompts == [[{"role": "user", "content": "Guess. It is below 10."}]] and level is None
        assert [message["role"] for message in completions[0]] == ["assistant", "tool", "assistant"]
        assert TOKENIZER.decode(completion_ids[0]).endswith("done")
        return [float(secret[0])]

    said = [call("guess", number=7), "done"]
    none = lambda environments, **kwargs: [None]  # noqa: E731
    assert "get_reward" not in str(from_trl(Own).schemas())
    for reward, total in ((None, 10.0), ([later, none], 17.0), (reward_func, 11.0), (lambda env: env.secret, 17.0)):
        assert play(from_trl(Own, reward=reward), asked(), said, TOKENIZER).turn_rewards[-1] == total
    plain = [play(from_trl(GuessEnv, reward=reward), asked(), said, TOKENIZER) for reward in (None, none)]
    assert all(str(episode.turn_rewards[-1]) == "nan" for episode in plain)
    with pytest.raises(DataError, match="gave str 'good'"):
        play(from_trl(GuessEnv, reward=lambda env: "good"), asked(), said, TOKENIZER)
    with pytest.raises(DataError, match="list of 1 numbers"):
        play(from_trl(GuessEnv, reward=lambda environments: [1.0, 2.0]), asked(), said, TOKENIZER)


@pytest.mark.parametrize("thoughts", ["keep", "strip"])
def test_completion_ids_are_those_of_the_sample_without_what_was_written_anew(thoughts):
    env = from_trl(GuessEnv, reward=lambda environments, completion_ids: [len(completion_ids[0])])
    said = [call("guess", number=1), f"<think>it is 7</think>{call('guess', number=7)}", "done"]
    episode = play(env, asked(), said, TOKENIZER, thoughts=thoughts)
    begins = episode.contexts or [len(episode.tokens)]
    after = [token for token, sampled in zip(episode.tokens, episode.mask, strict=True) if sampled][-len("done") :]
    assert len(episode.contexts) == (thoughts == "strip")
    completion = [*episode.tokens[: begins[0]], *(after if episode.contexts else [])]
    assert episode.env.completion == completion and episode.turn_rewards[-1] == len(completion)


def test_samples_side_by_side_have_instances_of_their_own_and_later_ones_take_them_again():
    env = from_trl(GuessEnv)
    one, two = (begun(env, asked(), TOKENIZER) for _ in range(2))
    first = one.env.instance
    assert first is not two.env.instance
    first.guesses.append(1)
    one.close()
    again = begun(env, asked(), TOKENIZER)
    assert again.env.instance is first and first.guesses == []
    assert begun(from_trl(GuessEnv), asked(), TOKENIZER).env.instance is not two.env.instance


def test_an_instance_whose_reset_failed_is_not_taken_again_and_pools_are_few():
    class Picky(GuessEnv):
        def reset(self, secret, **columns):
            if secret < 0:
                raise OSError("away")

    with pytest.raises(OSError, match="away"):
        begun(from_trl(Picky), asked(secret=-1), TOKENIZER)
    taken = Instances(Picky)
    taken.give_back(taken.take(), whole=False)
    made = [taken.take(), taken.take()]
    assert made[0] is not made[1]
    pools = [pool((f"k{i}", ""), Picky) for i in range(MOST_POOLS + 1)]
    assert pool((f"k{MOST_POOLS}", ""), Picky) is pools[-1] and pool(("k0", ""), Picky) is not pools[0]


def test_a_factory_that_gives_one_instance_twice_is_refused():
    one = GuessEnv()
    shared = Instances(lambda: one)
    shared.take()
    with pytest.raises(DataError, match="instance of its own"):
        shared.take()


def test_what_is_wrong_with_a_factory_is_said_where_it_is_given():
    class Still:
        def rest(self): ...

    class Mute:
        def reset(self, **columns): ...

        def _look(self): ...

    class Demanding(GuessEnv):
        def __init__(self, url):
            self.url = url

    for factory, token in (
        (Still, r"Still has no method reset.*nearest: rest.*are: rest"),
        (Mute, "Mute has no tools.*are: reset"),
        (GuessEnv(), "GuessEnv is no factory: give the class"),
        (Demanding, r"Demanding\(\) raised TypeError.*url.*partial"),
        ({}, "nothing given"),
        ({1: GuessEnv}, "factories by name"),
    ):
        with pytest.raises(DataError, match=token):
            from_trl(factory)
    assert from_trl(functools.partial(Demanding, "u")).offers[""].title == "Demanding"


def test_what_is_wrong_with_a_reward_is_said_where_it_is_given():
    for reward, token in (
        (3, "no function"),
        ("reward", "no function"),
        (lambda one, two: 1.0, r"takes \(one, two\)"),
        (lambda environments, log_metric: [1.0], "log_metric=None"),
        (lambda rollout: 1.0, "function of a rollout"),
    ):
        with pytest.raises(DataError, match=token):
            from_trl(GuessEnv, reward=reward)


def test_rows_without_a_column_that_is_needed_are_refused_before_the_rollout():
    env = from_trl(GuessEnv, reward=lambda environments, level: [1.0])
    env.check_prompts([asked(level=1)])
    with pytest.raises(DataError, match=r"prompt 1: GuessEnv.reset takes secret.*they have .*level"):
        env.check_prompts([asked(level=1), Prompt(ASKED, meta={"level": 1})])
    with pytest.raises(DataError, match="takes level"):
        env.check_prompts([asked()])


def test_trls_function_of_environments_is_refused_where_there_are_none():
    with pytest.raises(DataError, match=r"from_trl\(…, reward=reward_func\)"):
        answers("7").score(reward_func)


class Doors(GuessEnv):
    def reset(self, **columns: Any) -> None:
        self.columns = columns

    def open(self, door: str) -> str:
        """
        Open a door.

        Args:
            door: Which one.
        """
        return f"{door} is open"


def test_of_several_environments_each_row_meets_the_one_it_names_and_its_tools_alone():
    env = rb.envs.from_trl({"guess": GuessEnv, "doors": Doors})
    assert env.by_prompt and repr(env) == "from_trl('guess': GuessEnv, 'doors': Doors)"
    doors, guess = asked(environment="doors"), asked(environment="guess")
    assert [tool["function"]["name"] for tool in env.schemas_of(doors)] == ["guess", "hint", "open"]
    assert [tool["function"]["name"] for tool in env.schemas_of(guess)] == ["guess", "hint"]
    episode = play(env, doors, [call("open", door="left"), "done"], TOKENIZER)
    assert told(episode) == ["left is open"] and "environment" not in episode.env.instance.columns
    assert "no tool 'open'" in told(play(env, guess, [call("open", door="left"), "done"], TOKENIZER))[0]
    with pytest.raises(DataError, match=r"prompt 1: .*'door'; nearest: doors"):
        env.check_prompts([doors, asked(environment="door")])
