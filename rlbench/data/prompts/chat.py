"""What a chat is written with besides its messages: options of the model's chat template, and the tools it names.

session.rollout(chats, template={"enable_thinking": False}, tools=[search])
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlbench.errors import DataError

CHAT_OPTIONS = ("template", "tools", "chat_template_kwargs")
"""Options of a call that say how chats are written; the last is the first by transformers' and vLLM's name."""
SET_BY_CALL = (
    "tools chat_template tokenize add_generation_prompt continue_final_message return_dict return_tensors padding "
    "truncation max_length conversation"
).split()


UNTOLD = (AttributeError, NameError, TypeError, ValueError)
"""What functions raise that say nothing of themselves: builtins, objects that can be called, types nobody knows."""


def split_chat(sampling: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the chat template is called with, and the other options."""
    rest = {name: value for name, value in sampling.items() if name not in CHAT_OPTIONS}
    return chat_options(**{name: value for name, value in sampling.items() if name in CHAT_OPTIONS}), rest


def chat_options(template: Any = None, tools: Any = None, chat_template_kwargs: Any = None) -> dict[str, Any]:
    """Return what the chat template is called with besides messages, its `tools` in OpenAI's form."""
    if template is not None and chat_template_kwargs is not None:
        raise DataError("template and chat_template_kwargs are one option: give one of them")
    template = chat_template_kwargs if template is None else template
    if template is not None and not isinstance(template, Mapping):
        raise DataError(f"template={template!r:.60}: wanted options of the chat template, {{'enable_thinking': False}}")
    if strange := [name for name in template or {} if name in SET_BY_CALL]:
        raise DataError(f"template: {', '.join(strange)} is not for a template to be told here; of tools: tools=[…]")
    return dict(template or {}) | ({} if tools is None else {"tools": schemas(tools)})


def schemas(tools: Sequence[Mapping[str, Any] | Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form; functions get theirs from signature and docstring, by `transformers`."""
    if isinstance(tools, Mapping | str) or not isinstance(tools, Sequence) or not tools:
        raise DataError(f"tools={tools!r:.60}: wanted a list of functions or of tools in OpenAI's form")
    return [_schema(tool) for tool in tools]


def _schema(tool: Any) -> dict[str, Any]:
    if callable(tool):
        from transformers.utils import chat_template_utils as utils

        try:
            return dict(utils.get_json_schema(tool))
        except (utils.DocstringParsingException, utils.TypeHintParsingException) as error:
            raise DataError(f"tools: {error}") from error
    tool = {"type": "function", "function": tool} if isinstance(tool, Mapping) and "name" in tool else tool
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping) or "name" not in tool["function"]:
        wanted = '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'
        raise DataError(f"tools: {tool!r:.60} is no tool: wanted a function, or {wanted}")
    return dict(tool)


def schema_of(name: str, fn: Callable[..., Any]) -> dict[str, Any]:
    """Return a function as a tool called `name`; where types or docstring say less than `schemas` wants, what is
    known of it: the names of its parameters and the text of its docstring."""
    from transformers.utils import chat_template_utils as utils

    try:
        known = dict(utils.get_json_schema(fn)["function"])
    except (utils.DocstringParsingException, utils.TypeHintParsingException, *UNTOLD):
        known = {"description": inspect.getdoc(fn) or "", "parameters": _parameters(fn)}
    return {"type": "function", "function": known | {"name": name}}


def _parameters(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin without one
        return {"type": "object", "properties": {}}
    named = [one for one in signature.parameters.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needed = [one.name for one in named if one.default is one.empty]
    return {"type": "object", "properties": {one.name: {} for one in named}, "required": needed}


def reads(tokenizer: Any, option: str, template: str | None = None, tools: Any = None) -> bool:
    """Whether a tokenizer's chat template, or the one given, reads an option; False without a template."""
    if tokenizer is None or (template is None and getattr(tokenizer, "chat_template", None) is None):
        return False
    try:
        text = str(tokenizer.get_chat_template(template, tools=tools))
    except ValueError:  # it has several, and none for this
        return False
    return re.search(rf"\b{re.escape(option)}\b", text) is not None


def check_read(tokenizer: Any, options: Mapping[str, Any], template: str | None = None) -> None:
    """Refuse options that the chat template does not read."""
    if template is None and getattr(tokenizer, "chat_template", None) is None:
        raise DataError(f"{', '.join(options)}: the tokenizer has no chat template to read it")
    tools = options.get("tools")
    if unread := [name for name in options if not reads(tokenizer, name, template, tools)]:
        raise DataError(f"the model's chat template does not read {', '.join(unread)}: it would have no effect")


class Templated:
    """A tokenizer whose chat template is called with these options as well; else the tokenizer itself.

    DataError where its template does not read one of them.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        check_read(tokenizer, options)
        self._tokenizer, self._options = tokenizer, dict(options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode texts."""
        return self._tokenizer(*args, **kwargs)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """Return the token ids of a chat."""
        return self._tokenizer.apply_chat_template(messages, **self._options, **options)
