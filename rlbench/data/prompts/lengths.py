"""How many tokens prompts have, counted the way the engines encode them, and which are too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data.base.optional import needed
from rlbench.data.prompts.messages import is_chat
from rlbench.data.prompts.prompt import Prompt
from rlbench.errors import DataError

AT_ONCE = 1024
HEAD = 60


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
            said = str(error).strip().split("\n")[0]
            raise DataError(f"tokenizer={str(tokenizer)!r} cannot be loaded: {said}") from error
    if not callable(tokenizer) or not hasattr(tokenizer, "apply_chat_template"):
        raise DataError(
            f"tokenizer= is a {type(tokenizer).__name__}: give a folder, a hub id or a tokenizer of transformers"
        )
    return tokenizer


def encoded(
    contents: Sequence[Any], tokenizer: Any, name: Callable[[int], str] = "prompt {}".format
) -> list[list[int]]:
    """Return the token ids of each prompt as an engine sees it; `name(i)` is what messages call it.

    Texts are taken with the special tokens that the tokenizer adds, chats through its template with the header of the
    answer. Images and other parts without text are only what the template writes for them.
    """
    found: list[list[int]] = [[] for _ in contents]
    texts: list[int] = []
    for i, content in enumerate(contents):
        if not isinstance(content, str) and not is_chat(content):
            found[i] = [int(token) for token in content]
        elif tokenizer is None:
            raise DataError(f"{name(i)} is no token ids: give tokenizer= (the model's folder); there is no tokenizer")
        elif not isinstance(content, str):
            if getattr(tokenizer, "chat_template", None) is None:
                raise DataError(
                    f"{name(i)} is chat messages, but the tokenizer has no chat template: give text, or set one"
                )
            try:
                ids = tokenizer.apply_chat_template(
                    content, tokenize=True, add_generation_prompt=True, return_dict=False
                )
            except Exception as error:  # a template is a program of its own and raises what it likes
                raise DataError(f"{name(i)}: the chat template refused: {type(error).__name__}: {error}") from error
            found[i] = [int(token) for token in ids]
        elif content:
            texts.append(i)
    if texts:
        rows = tokenizer([contents[i] for i in texts], verbose=False)["input_ids"]
        for i, row in zip(texts, rows, strict=True):
            found[i] = [int(token) for token in row]
    return found


def token_counts(prompts: Sequence[Prompt], rows: Sequence[int], tokenizer: Any = None) -> np.ndarray:
    """Count the tokens of each prompt (P,); `rows` are indices in the source table, for messages."""
    counts: list[int] = []
    for at in range(0, len(prompts), AT_ONCE):
        contents = [prompt.content for prompt in prompts[at : at + AT_ONCE]]
        counts += map(len, encoded(contents, tokenizer, lambda i, at=at: f"row {rows[at + i]}"))  # type: ignore[misc]
    return np.array(counts, np.int64)


def too_long(
    prompts: Sequence[Prompt], rows: Sequence[int], counts: np.ndarray, limit: int, source: str
) -> tuple[LongPrompt, ...]:
    """The prompts of more than `limit` tokens, in order."""
    over = np.flatnonzero(counts > limit).tolist()
    return tuple(LongPrompt(source, rows[i], int(counts[i]), prompts[i].text[:HEAD]) for i in over)


def described(long: Sequence[LongPrompt], total: int, limit: int) -> str:
    """One line for a reader: how many of how many, and the longest."""
    longest = max(long, key=lambda one: one.tokens)
    return (
        f"{len(long)} of {total} prompts {'has' if len(long) == 1 else 'have'} more than {limit} tokens; the longest "
        f"has {longest.tokens} (row {longest.row}: {longest.text!r})"
    )
