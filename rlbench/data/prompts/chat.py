"""What a chat is written with besides its messages: options of the model's chat template, and the tools it names.

session.rollout(chats, template={"enable_thinking": False}, tools=[search])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlbench.errors import DataError

CHAT_OPTIONS = ("template", "tools")
SET_BY_CALL = (
    "tools chat_template tokenize add_generation_prompt continue_final_message return_dict return_tensors padding "
    "truncation max_length conversation"
).split()


def split_chat(sampling: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the chat template is called with, and the other options."""
    rest = {name: value for name, value in sampling.items() if name not in CHAT_OPTIONS}
    template, tools = sampling.get("template"), sampling.get("tools")
    if template is not None and not isinstance(template, Mapping):
        raise DataError(f"template={template!r:.60}: wanted options of the chat template, {{'enable_thinking': False}}")
    if strange := [name for name in template or {} if name in SET_BY_CALL]:
        raise DataError(f"template: {', '.join(strange)} is not for a template to be told here; of tools: tools=[…]")
    return dict(template or {}) | ({} if tools is None else {"tools": schemas(tools)}), rest


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


class Templated:
    """A tokenizer whose chat template is called with these options as well; else the tokenizer itself.

    DataError where its template does not read one of them.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise DataError(f"{', '.join(options)}: the tokenizer has no chat template to read it")
        text = str(tokenizer.get_chat_template(tools=options.get("tools")))
        unread = [name for name in options if not re.search(rf"\b{re.escape(name)}\b", text)]
        if unread:
            raise DataError(f"the model's chat template does not read {', '.join(unread)}: it would have no effect")
        self._tokenizer, self._options = tokenizer, dict(options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode texts."""
        return self._tokenizer(*args, **kwargs)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """Return the token ids of a chat."""
        return self._tokenizer.apply_chat_template(messages, **self._options, **options)
