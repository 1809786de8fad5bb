"""Tools: calls are found, executed and answered; what is wrong is told to the policy, a tool's fault to the user."""

import asyncio

import pytest
from PIL import Image

from rlbench.data import Prompt
from rlbench.envs import Turn, find_calls, tools
from rlbench.errors import DataError


def turn(text, last=False, number=0):
    return Turn(number, text, [1], "stop", last, Prompt("p", label="7"), [], [0, 1])


def add(a: int, b: int = 1) -> int:
    return a + b


def shout(text: str) -> str:
    return text.upper()


def broken(text: str) -> str:
    raise KeyError(f"no {text}")


async def later(text: str) -> str:
    await asyncio.sleep(0)
    return f"later {text}"


ENV = tools({"add": add, "shout": shout, "broken": broken, "later": later})


def answered(text, env=ENV):
    return env.step(turn(text)).observation


def test_both_formats_are_understood_in_order():
    text = 'a <tool>shout(x)</tool> b <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert [(c.name, c.arguments) for c in find_calls(text)] == [("shout", "x"), ("add", {"a": 2})]
    said = answered(text)
    assert said == [{"role": "tool", "content": "X"}, {"role": "tool", "content": "3"}]


def test_images_become_parts_of_the_result_and_only_placeholders_are_told():
    square = Image.new("RGB", (8, 8))
    drawing = tools({"draw": lambda: square, "both": lambda: ["two", square, 3], "add": add})
    step = drawing.step(turn("<tool>draw()</tool><tool>both()</tool><tool>add(1)</tool>"))
    part = {"type": "image", "image": square}
    texts = [{"type": "text", "text": text} for text in ("two", "3")]
    assert [message["content"] for message in step.observation] == [[part], [texts[0], part, texts[1]], "2"]
    assert step.info["tool_calls"][0]["result"] == [{"type": "image"}]
    (alone,) = answered("<tool>draw()</tool>", drawing)
    assert alone == {"role": "tool", "content": [part]}
    with pytest.raises(DataError, match="role='tool'"):
        answered("<tool>draw()</tool>", tools({"draw": lambda: square}, role=None))


def test_a_function_of_one_parameter_gets_the_text_others_literals():
    assert answered("<tool>shout(1+2, (a)')</tool>") == "1+2, (A)'"
    assert answered("<tool>add(2, b=40)</tool>") == "42"
    assert answered("<tool>later(x)</tool>") == "later x"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<tool>shot(x)</tool>", "no tool 'shot'; nearest: shout"),
        ("<tool>add(1, 2, 3)</tool>", "too many positional"),
        ("<tool>add(__import__('os').getpid())</tool>", "numbers, texts and lists"),
        ('<tool_call>{"name": "add", "arguments": {"c": 1}}</tool_call>', "missing a required argument: 'a'"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object"),
        ("<tool_call>{'name': 1}</tool_call>", "no JSON"),
        ('<tool_call>{"name": ["add"]}</tool_call>', '"name"'),
        ("<tool_call>" + "[" * 100_000, "no JSON"),
        ("<tool>add(" + "(" * 5000 + ")</tool>", "numbers, texts and lists"),
        ("<tool>add(" + "-" * 100_000 + "1)</tool>", "numbers, texts and lists"),  # a MemoryError of the parser
        ("<tool>add(" + "1+" * 100_000 + "1)</tool>", "numbers, texts and lists"),  # a RecursionError
    ],
)
def test_a_call_that_cannot_be_executed_is_answered_not_raised(text, told):
    step = ENV.step(turn(text))
    assert told in step.observation and step.observation.startswith("error: ")
    assert not step.done and "errors" not in step.info


def test_what_a_tool_raises_is_read_by_the_policy_and_kept_with_its_line():
    step = ENV.step(turn("<tool>broken(<b>)</tool>"))
    assert step.observation == "error: KeyError: 'no <b>'" and not step.done
    (error,) = step.info["errors"]
    assert error["where"] == "tool broken" and error["line"][0] == __file__ and "raise KeyError" in error["line"][3]
    assert step.info["tool_calls"][0]["name"] == "broken"


def test_a_turn_without_a_call_ends_the_sample_with_its_reward():
    env = tools([add], reward=lambda turn: float(turn.text == turn.prompt.label))
    assert env.step(turn("7")).reward == 1.0 and env.step(turn("8")).reward == 0.0 and env.step(turn("7")).done
    assert env.step(turn("<tool>add(1)</tool>")).reward is None
    assert env.step(turn("<tool>add(1)</tool>", last=True)).reward == 0.0  # no turn follows to earn one


def test_long_results_and_many_calls_are_cut_and_say_so():
    env = tools({"f": lambda text: "w" * 20_000})
    assert env.step(turn("<tool>f(1)</tool>")).observation.endswith("(12000 more characters were cut)")
    many = env.step(turn("<tool>f(1)</tool>" * 40))
    assert len(many.observation) == 17 and "only the first 16" in many.observation[-1]["content"]
    assert len(many.info["tool_calls"]) == 16 or many.info["tool_calls"][-1]["name"] == "f"


def test_results_inside_the_answer_and_a_parser_of_ones_own():
    def brackets(text):
        return find_calls(text.replace("[", "<tool>f(").replace("]", ")</tool>"))

    env = tools({"f": shout}, role=None, parser=brackets)
    assert env.step(turn("[a] [b]")).observation == "A\nB" and env.role is None


def test_wrong_tools_are_refused():
    for functions, token in (({}, "nothing"), ({"f": 3}, "'f'"), ([lambda: 1], "'<lambda>'")):
        with pytest.raises(DataError, match=token):
            tools(functions)


@pytest.mark.parametrize(
    ("text", "executed"),
    [
        ("<think>maybe <tool>double(2)</tool></think>4", 0),
        ("<think><tool>double(2)</tool></think><tool>double(3)</tool>", 1),
        ("opened by the prompt <tool>double(2)</tool></think><tool>double(3)</tool>", 1),
        ("<tool>double(3)</tool><think>and now <tool>double(2)</tool>", 1),
        ('<think><tool_call>{"name": "double", "arguments": {"x": 2}}</tool_call></think>4', 0),
    ],
)
def test_a_call_that_is_thought_about_is_not_executed(text, executed):
    called = []

    def double(x):
        called.append(x)
        return x

    said = Turn(0, text, [], "stop", False, Prompt("q"), [], [])
    step = tools([double]).step(said)
    assert len(called) == executed and step.done == (not executed)
    called.clear()
    tools([double], in_thoughts=True).step(said)
    assert len(called) == executed + 1
