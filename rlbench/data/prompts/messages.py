"""Chats as rows of a dataset hold them, brought into the one form engines take: `[{"role": …, "content": …}, …]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from rlbench.errors import DataError

_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Message = dict[str, Any]


def plain_content(value: Any) -> Any:
    """What a cell of a table holds, as a prompt's content.

    Arrays become lists. Messages lose the keys that Arrow filled in with null because other rows have them; those
    of ShareGPT (`{"from": "human", "value": …}`) get the standard names. Anything else comes back as it is.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple) and value and all(isinstance(m, Mapping) for m in value):
        return [_message(m) for m in value]
    return value


def as_chat(content: Any, system: str | None = None) -> list[Message]:
    """A text becomes a user message, a chat stays; with `system`, a system message comes before."""
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    if not is_chat(content):
        raise DataError("it is token ids, which cannot become a chat: give its text, or leave out system= and chat=")
    if system is None:
        return list(content)
    if content[0]["role"] == "system":
        raise DataError(
            f"its chat begins with a system message already ({str(content[0].get('content'))[:40]!r}): leave out "
            "system=, or drop that message: prompt=lambda row: row['messages'][1:]"
        )
    return [{"role": "system", "content": system}, *content]


def is_chat(content: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether content is chat messages."""
    return isinstance(content, list) and bool(content) and isinstance(content[0], Mapping)


def ends_with_answer(content: Any) -> bool:
    """Whether a chat's last message is the assistant's: in a table for fine-tuning that is the answer itself."""
    return is_chat(content) and content[-1].get("role") == "assistant"


def _message(message: Mapping[str, Any]) -> Message:
    if "role" not in message and {"from", "value"} <= set(message):
        sender = message["from"]
        if sender not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            raise DataError(f"a message is from {sender!r}; known: {known}. Give prompt= a function of the row")
        message = {"role": _SHAREGPT_ROLES[sender], "content": message["value"]}
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = [_without_nulls(part) if isinstance(part, Mapping) else part for part in content]
    rest = {key: value for key, value in _without_nulls(message).items() if key != "content"}
    return {**rest, "content": content} if "content" in message else rest


def _without_nulls(message: Mapping[str, Any]) -> Message:
    return {key: value for key, value in message.items() if value is not None}
