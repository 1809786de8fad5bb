"""Tools as an environment: calls are found in what the policy says, executed, and answered.

What the policy says is data: a call reaches only these functions, with texts and JSON values; nothing is evaluated.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rlbench.data.prompts.chat import schema_of
from rlbench.data.prompts.images import is_image
from rlbench.data.prompts.placing import without_images
from rlbench.data.prompts.prompt import Prompt
from rlbench.envs.episode import error_facts
from rlbench.envs.protocol import Env, Step, Turn, resolved
from rlbench.envs.thoughts import without_thoughts
from rlbench.errors import DataError, nearest
from rlbench.user_code import user_code

NAME = re.compile(r"[A-Za-z_]\w*")
TAG = re.compile(rf"<tool>\s*({NAME.pattern})\s*\((.*?)\)\s*</tool>", re.DOTALL)
JSON = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
MOST_CALLS = 16  # of one turn
LONGEST_RESULT = 8000  # characters


@dataclass(frozen=True)
class ToolCall:
    """A call found in a completion."""

    name: str
    arguments: Mapping[str, Any] | list[Any] | str  # by name, a list, or one text
    problem: str = ""  # why it cannot be executed, for the policy to read


class ToolUnavailable(DataError):
    """What a tool runs on failed, which is nothing of the policy's: raised in a tool, it ends the sample."""


Parser = Callable[[str], Iterable[ToolCall]]
Content = str | list[dict[str, Any]]
"""Of a message: a text, or parts."""


def tools(
    functions: Mapping[str, Callable[..., Any]] | Iterable[Callable[..., Any]],
    *,
    parser: Parser | None = None,
    in_thoughts: bool = False,
    reward: Callable[[Turn], float | None] | None = None,
    role: str | None = "tool",
) -> ToolEnv:
    """Make an environment whose samples may call functions; a turn without a call ends the sample.

    An unknown tool, arguments that do not fit and an exception in a tool are answered with a text that says so; the
    last is also among `rollouts.env_errors`. One that is an `rb.envs.ToolUnavailable` (a service that is away, no fault
    of the policy's) ends the sample instead, which is aborted and not trained on. Chats name the functions to the
    model, by signature and docstring, where its chat template reads `tools` and the rollout gives none of its own
    (`tools=[…]`); a function or a class given as `env` is not looked into.

    Args:
        functions: by name, or functions with names of their own; plain or async. What they return is told as text; an
            image (Pillow's), or a list of texts and images, is shown to a model that sees.
        parser: finds the calls in a turn's text; None: `find_calls`.
        in_thoughts: execute calls inside of `<think>…</think>` too, which are otherwise what the policy thinks about.
        reward: of a sample's last turn; None leaves rewards to `rollouts.score`.
        role: of the messages with results in a chat; None puts results behind the call, inside the assistant's message
            (give the end of the call as a stop string: `stop=["</tool>"]`), which images cannot be.
    """
    if not isinstance(functions, Mapping):
        functions = {getattr(fn, "__name__", ""): fn for fn in functions}
    wrong = [repr(name) for name, fn in functions.items() if not callable(fn) or not NAME.fullmatch(name)]
    if wrong or not functions:
        raise DataError(f"tools: {', '.join(wrong) or 'nothing'} given: wanted functions by name, {{'calculator': fn}}")
    return ToolEnv(dict(functions), parser or find_calls, reward, role, in_thoughts)


def find_calls(text: str) -> list[ToolCall]:
    """Return the calls in a text, in order; of two formats, the second as Qwen and Hermes models write it.

    `<tool>f(1+2)</tool>` and `<tool_call>{"name": "f", "arguments": {"expression": "1+2"}}</tool_call>`.
    """
    calls = {m.start(): ToolCall(m[1], m[2].strip()) for m in TAG.finditer(text)}
    calls |= {m.start(): _json_call(m[1]) for m in JSON.finditer(text)}
    return [calls[at] for at in sorted(calls)]


@dataclass(eq=False, repr=False)
class ToolEnv(Env):
    """See `tools`. A step's info holds `tool_calls`, each with `name`, `arguments` and `result`."""

    functions: dict[str, Callable[..., Any]]
    parser: Parser
    reward: Callable[[Turn], float | None] | None
    role: str | None
    in_thoughts: bool = False
    told_by_name: ClassVar[bool] = False  # each result is a message with the tool's name, also where it is one text

    def schemas(self) -> list[dict[str, Any]]:
        """Return the functions in OpenAI's form, as a chat template names them to the model."""
        return [schema_of(name, fn) for name, fn in self.functions.items()]

    @property
    def by_prompt(self) -> bool:
        """Whether prompts differ in the tools that they name."""
        return False

    def schemas_of(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Return the tools that a prompt names."""
        return self.schemas()

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that no sample can begin with, before any does."""

    def __repr__(self) -> str:
        return f"tools({', '.join(self.functions)})"

    def step(self, turn: Turn) -> Step:
        """Execute the turn's calls; none, or no turn left to read a result in: the sample is over."""
        calls = self.calls(turn)
        executed = [(call, *self._executed(call)) for call in calls[:MOST_CALLS]]
        reward = self.reward(turn) if self.reward is not None and (turn.last or not calls) else None
        if not calls:
            return Step(reward=reward, done=True)
        results = [result for _, result, _ in executed]
        if self.role is None and any(isinstance(result, list) for result in results):
            raise DataError(
                "a tool gave an image, which cannot stand inside the assistant's message: tools(…, role='tool')"
            )
        if len(calls) > MOST_CALLS:
            results.append(self.refusal(f"{len(calls)} calls in one turn; only the first {MOST_CALLS} were executed"))
        info: dict[str, Any] = {
            "tool_calls": [
                {"name": call.name, "arguments": call.arguments, "result": without_images(result)}
                for call, result, _ in executed
            ]
        }
        if errors := [error for _, _, error in executed if error is not None]:
            info["errors"] = errors
        texts = [result for result in results if isinstance(result, str)]
        if self.role is None or (len(texts) == len(results) == 1 and not self.told_by_name):
            return Step("\n".join(texts), reward, info=info)
        names = [call.name for call, *_ in executed]
        return Step(list(map(self._message, results, [*names, ""])), reward, info=info)

    def calls(self, turn: Turn) -> list[ToolCall]:
        """Return the calls in what the policy said."""
        return list(self.parser(turn.text if self.in_thoughts else without_thoughts(turn.text)))

    def result(self, value: Any) -> Any:
        """Return what a tool returned, or what that gives where it can be awaited."""
        return resolved(value)

    def content(self, value: Any) -> Content:
        """Return a result as the policy reads it."""
        return as_content(value)

    def refusal(self, said: str) -> str:
        """Return what is wrong with a call as the policy reads it."""
        return f"error: {said}"

    def failure(self, error: Exception, name: str) -> tuple[str, dict[str, Any] | None]:
        """Return what a tool raised as the policy reads it, and as the user does."""
        return self.refusal(f"{type(error).__name__}: {error}"), error_facts(error, f"tool {name}")

    def _message(self, result: Content, name: str) -> dict[str, Any]:
        return {"role": self.role, "content": result} | ({"name": name} if name and self.told_by_name else {})

    def _executed(self, call: ToolCall) -> tuple[Content, dict[str, Any] | None]:
        """Return what the policy reads, and the error where the tool itself raised one."""
        fn = self.functions.get(call.name)
        if fn is None and call.name:
            known = ", ".join(self.functions)
            return self.refusal(f"no tool {call.name!r}{nearest(call.name, self.functions)}; there are: {known}"), None
        if call.problem or fn is None:
            return self.refusal(call.problem or "a call without a name"), None
        try:
            args, kwargs = _bound(fn, call.arguments)
        except (TypeError, ValueError, SyntaxError) as wrong:
            return self.refusal(f"{call.name}: {wrong}"), None
        try:
            with user_code():
                value = self.result(fn(*args, **kwargs))
        except ToolUnavailable:
            raise
        except Exception as error:  # the tool's own: for the policy to read, and for the user to see
            said, facts = self.failure(error, call.name)
            return said[:LONGEST_RESULT], facts
        return self.content(value), None


def _json_call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, f"the call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, 'a call is {"name": …, "arguments": {…}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], {}, f"{call['name']}: arguments must be an object with names")
    return ToolCall(call["name"], arguments)


def _bound(fn: Callable[..., Any], arguments: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments as the function takes them; TypeError, ValueError or SyntaxError where they do not fit."""
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
    """Read `1, "a", unit="m"` as arguments: literals alone, nothing is evaluated."""
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


def as_content(value: Any) -> Content:
    """Return a result as a message's content: parts where it is an image or a list that holds one, else a text."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    if not any(map(is_image, listed)):
        return _as_text(value)
    return [
        {"type": "image", "image": one} if is_image(one) else {"type": "text", "text": _as_text(one)} for one in listed
    ]


def shortened(text: str) -> str:
    """Return a text, its end cut and counted where it is very long."""
    cut = len(text) - LONGEST_RESULT
    return text if cut <= 0 else f"{text[:LONGEST_RESULT]}… ({cut} more characters were cut)"


def _as_text(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return shortened(text)
