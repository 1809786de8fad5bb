"""What is asked: a text, chat messages or token ids, with the reference answer a reward may need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rlbench.errors import DataError, Suggesting

PromptContent: TypeAlias = str | list[dict[str, Any]] | list[int]
OTHER_INPUTS = ("multi_modal_data", "mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds")
"""Inputs that vLLM's prompts may have beside text and tokens."""


@dataclass(frozen=True)
class Prompt(Suggesting):
    """One prompt. `content`: text, chat messages (`[{"role": …, "content": …}]`) or token ids.

    `label` is the reference answer, passed on untouched to rewards; `meta` holds anything else of its row.
    """

    content: PromptContent
    label: Any = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The prompt for a reader: the text, the last message's content, or the token ids in brackets.

        Images and what else is no text in a message are named in brackets: `[image] What is this?`.
        """
        if isinstance(self.content, str):
            return self.content
        if self.content and isinstance(self.content[0], dict):
            return message_text(self.content[-1])
        return str(list(self.content))


def message_text(message: Mapping[str, Any]) -> str:
    """A message's text; its content may be a text, a list of parts (text, image, …) or missing."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, list | tuple):
        return " ".join(part_text(part) for part in content)
    return str(content)


def part_text(part: Any) -> str:
    """One part of a message: its text, or its kind in brackets (`[image]`)."""
    if isinstance(part, Mapping):
        kind = str(part.get("type", "part"))
        if "text" in part and kind in ("text", "part"):
            return str(part["text"])
        return f"[{kind.removesuffix('_url')}]"
    return str(part)


def as_prompts(prompts: Any) -> list[Prompt]:
    """Accept what people hold: one prompt or many; strings, messages, token ids, `Prompt`s, or rows (dicts, a data
    frame's too) with a `prompt`, or vLLM's `prompt_token_ids`, and perhaps a `label`; a `PromptSet` of
    `rlbench.data.load`.

    Raises DataError for an empty list and for anything else, naming the index.
    """
    if hasattr(prompts, "columns") and hasattr(prompts, "to_dict"):
        prompts = prompts.to_dict("records")  # iterating a data frame would give the names of its columns
    elif hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str | Prompt | Mapping) or _is_token_ids(prompts) or _is_chat(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Iterable):
        mend = ": take some of it, .take(n)" if hasattr(prompts, "take") else ""
        raise DataError(f"prompts: wanted a list of texts, chats or token ids, got {type(prompts).__name__}{mend}")
    found = [as_prompt(p, i) for i, p in enumerate(prompts)]
    if not found:
        raise DataError("the prompt list is empty: give at least one prompt")
    return found


def as_prompt(value: Any, index: int) -> Prompt:
    """One prompt of `as_prompts`; `index` names it where it is none (DataError)."""
    if isinstance(value, Prompt):
        return value
    if isinstance(value, Mapping) and ("prompt" in value or "prompt_token_ids" in value):
        return _of_row(value, index)
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        if not value:
            raise DataError(f"prompt {index} is an empty text")
        return Prompt(value)
    if _is_token_ids(value):
        return Prompt(list(value))
    if _is_chat(value):
        return Prompt([dict(m) for m in value])
    shown = repr(value)
    raise DataError(
        f"prompt {index}: wanted a text, chat messages ([{{'role': …, 'content': …}}]), token ids or a row with "
        f"'prompt'; got {type(value).__name__} {shown[:60]}{'…' if len(shown) > 60 else ''}"
    )


def _of_row(row: Mapping[str, Any], index: int) -> Prompt:
    """A dict with what is asked; of vLLM's, the token ids count before the text."""
    for name in OTHER_INPUTS:
        if row.get(name) is not None:
            raise DataError(
                f"prompt {index} has {name}: only text, chats and token ids are generated from, vision-language models "
                "are not here yet; leave it out"
            )
    asked = "prompt_token_ids" if row.get("prompt_token_ids") is not None else "prompt"
    rest = {k: v for k, v in row.items() if k not in ("prompt", "prompt_token_ids", "label", *OTHER_INPUTS)}
    inner = as_prompt(row[asked], index)
    return Prompt(inner.content, row.get("label"), rest)


def is_chat_or_tokens(value: Any) -> bool:
    """Whether a value is chat messages or token ids, as they are or as an array."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return _is_token_ids(value) or _is_chat(value)


def _is_token_ids(value: Any) -> bool:
    some = isinstance(value, list | tuple) and len(value) > 0
    return some and all(isinstance(token, int) and not isinstance(token, bool) for token in value)


def _is_chat(value: Any) -> bool:
    some = isinstance(value, list | tuple) and len(value) > 0
    return some and all(isinstance(one, Mapping) and "role" in one and "prompt" not in one for one in value)
