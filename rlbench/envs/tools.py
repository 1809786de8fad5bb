"""Tools as an environment: calls are found in what the policy says, executed, and answered.

    def calculator(expression: str) -> float: ...

    env = rb.envs.tools({"calculator": calculator}, reward=lambda turn: float(turn.text.strip() == turn.prompt.label))

Two formats are understood, the second as Qwen and Hermes models write it:

    <tool>calculator(1+2)</tool>
    <tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>

What the policy says is data: a call reaches only the functions given here, with texts and JSON values as arguments, and
nothing of it is ever evaluated. What a function does with them is its own affair.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlbench.envs.episode import error_facts
from rlbench.envs.protocol import Env, Step, Turn, awaited
from rlbench.errors import DataError, nearest
from rlbench.user_code import user_code

TAG = re.compile(r"<tool>\s*([A-Za-z_]\w*)\s*\((.*?)\)\s*</tool>", re.DOTALL)
JSON = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
MOST_CALLS = 16
"""Calls of one turn that are executed."""
LONGEST_RESULT = 8000
"""Characters of a result; what is beyond is cut, and said to be."""


@dataclass(frozen=True)
class ToolCall:
    """A call found in a completion. `arguments`: by name, or one text for a function of one parameter, or a list.

    `problem`: why it cannot be executed, for the policy to read; empty where it can.
    """

    name: str
    arguments: Mapping[str, Any] | list[Any] | str
    problem: str = ""


Parser = Callable[[str], Iterable[ToolCall]]


def tools(
    functions: Mapping[str, Callable[..., Any]] | Iterable[Callable[..., Any]],
    *,
    parser: Parser | None = None,
    reward: Callable[[Turn], float | None] | None = None,
    role: str | None = "tool",
) -> ToolEnv:
    """An environment whose samples may call functions; a turn without a call ends the sample.

    An unknown tool and arguments that do not fit are answered with a text that says so. So is an exception in a tool,
    which is also kept: `rollouts.env_errors` lists it with its line.

    Args:
        functions: by name, or functions with names of their own; plain or async.
        parser: finds the calls in a turn's text; None understands both formats of this module.
        reward: of a sample's last turn; None leaves rewards to `rollouts.score`.
        role: of the messages with results in a chat; None puts results behind the call, inside the assistant's message
            (give the end of the call as a stop string: `stop=["</tool>"]`).
    """
    if not isinstance(functions, Mapping):
        functions = {getattr(fn, "__name__", ""): fn for fn in functions}
    for name, fn in functions.items():
        if not callable(fn) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise DataError(f"tools: {name!r} is {type(fn).__name__}: wanted functions by name, {{'name': function}}")
    if not functions:
        raise DataError("tools: no functions were given: {'calculator': fn}")
    return ToolEnv(dict(functions), parser or find_calls, reward, role)


def find_calls(text: str) -> list[ToolCall]:
    """The calls of both formats, in order."""
    found = [(m.start(), ToolCall(m[1], m[2].strip())) for m in TAG.finditer(text)]
    found += [(m.start(), _json_call(m[1])) for m in JSON.finditer(text)]
    return [call for _, call in sorted(found, key=lambda pair: pair[0])]


@dataclass(eq=False, repr=False)
class ToolEnv(Env):
    """See `tools`. A step's info holds `tool_calls`, each with `name`, `arguments` and `result`."""

    functions: dict[str, Callable[..., Any]]
    parser: Parser
    reward: Callable[[Turn], float | None] | None
    role: str | None

    def __repr__(self) -> str:
        return f"tools({', '.join(self.functions)})"

    def step(self, turn: Turn) -> Step:
        """Execute the turn's calls; none, or no turn left to read a result in: the sample is over."""
        calls = list(self.parser(turn.text))
        if not calls:
            return Step(reward=self._rewarded(turn), done=True)
        results, errors = [], []
        for call in calls[:MOST_CALLS]:
            said, error = self._executed(call)
            results.append(said)
            errors += [error] if error is not None else []
        if len(calls) > MOST_CALLS:
            results.append(f"error: {len(calls)} calls in one turn; only the first {MOST_CALLS} were executed")
        made = [
            {"name": call.name, "arguments": call.arguments, "result": said}
            for call, said in zip(calls, results, strict=False)
        ]
        return Step(
            "\n".join(results)
            if self.role is None or len(results) == 1
            else [{"role": self.role, "content": said} for said in results],
            self._rewarded(turn) if turn.last else None,
            info={"tool_calls": made, **({"errors": errors} if errors else {})},
        )

    def _rewarded(self, turn: Turn) -> float | None:
        return None if self.reward is None else self.reward(turn)

    def _executed(self, call: ToolCall) -> tuple[str, dict[str, Any] | None]:
        """What the policy reads, and the error where the tool itself raised one."""
        fn = self.functions.get(call.name)
        if fn is None and call.name:
            known = ", ".join(self.functions)
            return f"error: no tool {call.name!r}{nearest(call.name, self.functions)}; there are: {known}", None
        if call.problem or fn is None:
            return f"error: {call.problem or 'a call without a name'}", None
        try:
            args, kwargs = _bound(fn, call.arguments)
        except (TypeError, ValueError, SyntaxError) as wrong:
            return f"error: {call.name}: {wrong}", None
        try:
            with user_code():
                value = fn(*args, **kwargs)
                if inspect.isawaitable(value):
                    value = asyncio.run(awaited(value))
        except Exception as error:  # the tool's own: for the policy to read, and for the user to see
            return f"error: {type(error).__name__}: {error}"[:LONGEST_RESULT], error_facts(error, f"tool {call.name}")
        return _shortened(value if isinstance(value, str) else _as_text(value)), None


def _json_call(text: str) -> ToolCall:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is no JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, 'a call is {"name": …, "arguments": {…}}')
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], {}, f"{found['name']}: arguments must be an object with names")
    return ToolCall(found["name"], arguments)


def _bound(fn: Callable[..., Any], arguments: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as the function takes them. Raises TypeError, ValueError or SyntaxError where they do not fit."""
    try:
        signature = inspect.signature(fn)
    except ValueError:  # a builtin without one: it says itself what does not fit
        signature = None
    if isinstance(arguments, str):
        count = None if signature is None else len(signature.parameters)
        args, kwargs = ((arguments,), {}) if count == 1 else _literals(arguments)
    elif isinstance(arguments, Mapping):
        args, kwargs = (), {str(name): value for name, value in arguments.items()}
    else:
        args, kwargs = tuple(arguments), {}
    if signature is not None:
        signature.bind(*args, **kwargs)
    return args, kwargs


def _literals(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`1, "a", unit="m"` as arguments: literals alone, nothing is evaluated."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("more than one call")
        args = tuple(ast.literal_eval(arg) for arg in call.args)
        kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"arguments must be numbers, texts and lists, as in f(1, 'a', unit='m'); got {text[:80]!r}"
        ) from error
    return args, kwargs


def _as_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_RESULT:
        return text
    return f"{text[:LONGEST_RESULT]}… ({len(text) - LONGEST_RESULT} more characters were cut)"
