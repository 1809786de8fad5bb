"""How many tokens prompts have, counted the way the engines encode them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data.base.drawing import needed
from rlbench.data.prompts.prompt import Prompt, is_chat
from rlbench.errors import DataError

AT_ONCE = 1024


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

    Texts are taken with the special tokens that the tokenizer adds, chats through its template with the header of the
    answer. Images and other parts without text are only what the template writes for them.
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
                ids[i] = list(tokenizer.apply_chat_template(content, add_generation_prompt=True, return_dict=False))
            except Exception as error:  # a template is a program of its own and raises what it likes
                raise DataError(f"{name(i)}: the chat template refused: {type(error).__name__}: {error}") from error
    if texts:
        rows = tokenizer([contents[i] for i in texts], verbose=False)["input_ids"]
        for i, row in zip(texts, rows, strict=True):
            ids[i] = list(row)
    return ids


def token_counts(prompts: Sequence[Prompt], rows: Sequence[int], tokenizer: Any = None) -> np.ndarray:
    """Count the tokens of each prompt (P,); `rows` are indices in the source table, for messages."""
    counts: list[int] = []
    for at in range(0, len(prompts), AT_ONCE):
        contents = [prompt.content for prompt in prompts[at : at + AT_ONCE]]
        names = [f"row {row}" for row in rows[at : at + AT_ONCE]]
        counts += map(len, encoded(contents, tokenizer, names.__getitem__))
    return np.array(counts, np.int64)
