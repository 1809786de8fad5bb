"""How many tokens prompts have, counted the way the engines encode them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data.base.drawing import needed
from rlbench.data.prompts.prompt import Message, Prompt, is_chat, message_text
from rlbench.errors import DataError
from rlbench.traces import user_stacklevel

AT_ONCE = 1024
GO_ON = "continue_final_message"
"""The option of chat templates by which the last message is left open."""


@dataclass(frozen=True)
class LongPrompt:
    """A prompt longer than allowed. `row`: its index in the source table `source`; `text`: how it begins."""

    source: str
    row: int
    tokens: int
    text: str


def open_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer of `transformers`, from a folder, a hub id, or as it is."""
    if isinstance(tokenizer, str | Path):
        transformers = needed("transformers", "load(…, tokenizer=…)")
        try:
            return transformers.AutoTokenizer.from_pretrained(str(Path(tokenizer).expanduser()))
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise DataError(f"tokenizer={str(tokenizer)!r} cannot be loaded: {reason}") from error
    if not hasattr(tokenizer, "apply_chat_template"):
        kind = type(tokenizer).__name__
        raise DataError(f"tokenizer= is a {kind}: give a folder, a hub id or a tokenizer of transformers")
    return tokenizer


def encoded(
    contents: Sequence[Any], tokenizer: Any, name: Callable[[int], str] = "prompt {}".format
) -> list[list[int]]:
    """Return the token ids of each prompt as an engine sees it; `name(i)` is what messages call it.

    Texts are taken with the special tokens that the tokenizer adds (once, see `text_ids`), chats through its template
    (see `chat_ids`). Images and other parts without text are only what the template writes for them.
    """
    ids: list[list[int]] = [[] for _ in contents]
    texts: list[int] = []
    for i, content in enumerate(contents):
        if not isinstance(content, str) and not is_chat(content):
            ids[i] = [int(token) for token in content]
        elif tokenizer is None:
            raise DataError(f"{name(i)} is no token ids: give tokenizer= (the model's folder); there is no tokenizer")
        elif isinstance(content, str):
            texts += [i] if content else []
        elif getattr(tokenizer, "chat_template", None) is None:
            raise DataError(f"{name(i)} is chat messages, but the tokenizer has no chat template: give text")
        else:
            try:
                ids[i] = chat_ids(tokenizer, content)
            except Exception as error:  # a template is a program of its own and raises what it likes
                raise DataError(f"{name(i)}: the chat template refused: {type(error).__name__}: {error}") from error
    if texts:
        for i, row in zip(texts, text_ids([contents[i] for i in texts], tokenizer), strict=True):
            ids[i] = row
    return ids


def chat_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of a chat with the header of the answer. Where the last message is the assistant's, the
    answer begins with what it says, and no end of the turn stands behind it."""
    go_on = continues(messages)
    options = {"add_generation_prompt": not go_on, "return_dict": False}
    return list(tokenizer.apply_chat_template(list(messages), **options, **({GO_ON: True} if go_on else {})))


def continues(messages: Sequence[Message]) -> bool:
    """Whether a chat ends with the beginning of an answer: words of the assistant's, and no call of a tool."""
    last = messages[-1]
    return last.get("role") == "assistant" and bool(message_text(last).strip()) and not last.get("tool_calls")


def open_note(prompts: Sequence[Prompt], what: str) -> str:
    """Say how many chats end with the beginning of an answer, which the policy goes on with; "" where none does."""
    count = sum(is_chat(prompt.content) and continues(prompt.content) for prompt in prompts)
    said = "end with an assistant's message, which the policy goes on with"
    return f"{what}: {count} of {len(prompts)} chats {said}" if count else ""


def answered(messages: Sequence[Message], answer: Message) -> list[Message]:
    """Return a chat with its answer, which goes on in the last message where that is the beginning of it."""
    if not messages or not continues(messages):
        return [*messages, answer]
    return [*messages[:-1], {**answer, "content": message_text(messages[-1]) + message_text(answer)}]


def text_ids(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the token ids of texts, with the special tokens that the tokenizer adds.

    A text that begins with them already, as one that a chat template has rendered, gets no second ones: it warns.
    """
    rows = [list(row) for row in tokenizer(list(texts), verbose=False)["input_ids"]]
    repeats = any(row[0] in row[1:4] for row in rows if row)  # which is cheap to see
    if repeats and (note := begun_note(texts, begin_text(tokenizer))):
        warnings.warn(note, stacklevel=user_stacklevel())
        begin = begin_ids(tokenizer)
        rows = [without_second(row, begin) for row in rows]
    return rows


def begin_ids(tokenizer: Any) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text; most have one, or none."""
    whole, bare = (list(tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (True, False))
    places = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[: next(places, 0)]


def begin_text(tokenizer: Any) -> str:
    """Return the special tokens that a tokenizer puts before a text, as they are written; "" without a tokenizer."""
    return "" if tokenizer is None else "".join(tokenizer.convert_ids_to_tokens(begin_ids(tokenizer)))


def without_second(ids: list[int], begin: Sequence[int]) -> list[int]:
    """Return token ids that stand behind the special tokens `begin` once where they stood there twice."""
    own = len(begin)
    return ids[own:] if own and ids[: 2 * own] == [*begin, *begin] else ids


def begun_note(contents: Sequence[Any], begin: str) -> str:
    """Say which prompts are texts that begin with what the tokenizer puts before them; "" where none does."""
    begun = [
        i for i, content in enumerate(contents) if begin and isinstance(content, str) and content.startswith(begin)
    ]
    if not begun:
        return ""
    return (
        f"{len(begun)} of {len(contents)} prompts (the first is {begun[0]}) begin with {begin}, which the tokenizer "
        "puts before a text: it stands there once. Is it what the chat template has rendered? Messages are rendered "
        'for you, with its options: template={"enable_thinking": False}'
    )


def token_counts(prompts: Sequence[Prompt], rows: Sequence[int], tokenizer: Any = None) -> np.ndarray:
    """Count the tokens of each prompt (P,); `rows` are indices in the source table, for messages."""
    counts: list[int] = []
    for at in range(0, len(prompts), AT_ONCE):
        contents = [prompt.content for prompt in prompts[at : at + AT_ONCE]]
        names = [f"row {row}" for row in rows[at : at + AT_ONCE]]
        counts += map(len, encoded(contents, tokenizer, names.__getitem__))
    return np.array(counts, np.int64)
