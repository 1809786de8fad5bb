"""The text of sampled tokens: without those that hold a conversation together, with those that a format is made of.

A special token may be either. The end token, padding and what the chat template puts around messages are no part of
what was said; `<tool_call>` or `<think>` are, also where the tokenizer calls them special.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

ROLES = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")
_TAG = re.compile(r"</?(\w[\w.:-]*)>")
_USER, _ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
_CHATS = (
    [_USER, _ASSISTANT, _USER],
    [{"role": "system", "content": "c"}, _USER],
    [_USER, _ASSISTANT, {"role": "tool", "content": "d"}],
)
"""What a chat template is asked to put around; it may refuse a role."""


def decoder(tokenizer: Any, skip_special_tokens: bool = True) -> Callable[[Sequence[int]], str]:
    """Return what makes the text of token ids; an empty one without a tokenizer.

    `skip_special_tokens=False` leaves all special tokens in, but for an end token at the end.
    """
    if tokenizer is None:
        return lambda ids: ""
    left_out, ends = parts_of_text(tokenizer)
    return partial(text_of, tokenizer, left_out if skip_special_tokens else frozenset(), ends)


def parts_of_text(tokenizer: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Return which tokens are left out of texts, and which at their end alone."""
    control, special = control_tokens(tokenizer), _special(tokenizer)
    return control, control | {number for number, token in special.items() if not _is_pair(token, special.values())}


def control_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens that are no part of a text: those with a role of their own (end, padding, …), and those
    that the chat template puts around messages, tags in pairs (`<think>`, `</think>`) apart."""
    special = _special(tokenizer)
    around = set(_around_messages(tokenizer)) if getattr(tokenizer, "chat_template", None) else set()
    markers = {number for number in around & special.keys() if not _is_pair(special[number], special.values())}
    roles = {getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
    return frozenset(markers | {int(number) for number in roles if number is not None})


def _special(tokenizer: Any) -> dict[int, str]:
    """Special tokens by number; of a tokenizer that does not list what was added, none but those with a role."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {int(number): str(token) for number, token in added.items() if token.special}


def _around_messages(tokenizer: Any) -> Iterator[int]:
    for chat in _CHATS:
        try:
            rendered = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, add_generation_prompt=True)
        except Exception:  # a chat template refuses roles and orders in its own ways
            continue
        yield from map(int, rendered["input_ids"])


def _is_pair(token: str, names: Collection[str]) -> bool:
    tag = _TAG.fullmatch(token)
    return tag is not None and f"<{tag[1]}>" in names and f"</{tag[1]}>" in names


def text_of(tokenizer: Any, left_out: frozenset[int], ends: frozenset[int], ids: Sequence[int]) -> str:
    """Return the text of token ids; `tokenizer`: transformers' or the Rust library's."""
    kept = [int(token) for token in ids]
    if kept and kept[-1] in ends:
        kept = kept[:-1]
    return str(tokenizer.decode([token for token in kept if token not in left_out], skip_special_tokens=False))
