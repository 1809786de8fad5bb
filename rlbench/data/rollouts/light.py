"""Texts to token ids and back by the Rust library `tokenizers` alone, in a kernel that need not import transformers for
it (2.5 s): where that is seen to do what the tokenizer does that a replica opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.data.rollouts.decoding import parts_of_text, text_of
from rlbench.data.rollouts.pieces import tokenizer_file

STEPS = ("normalizer", "pre_tokenizer", "decoder")
"""Which transformers sets anew for some families, whatever the file says."""
MODEL = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges")


def told_of_texts(tokenizer: Any) -> dict[str, Any] | None:
    """Return what a process without transformers has to know of a tokenizer of theirs; None where the Rust library
    alone would do something else."""
    from transformers import PreTrainedTokenizerFast as Fast

    backend, kind = getattr(tokenizer, "backend_tokenizer", None), type(tokenizer)
    if backend is None or not isinstance(tokenizer, Fast) or tokenizer.split_special_tokens:
        return None
    if kind._decode is not Fast._decode or kind._encode_plus is not Fast._encode_plus:
        return None
    if tokenizer.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE":
        return None
    left_out, ends = parts_of_text(tokenizer)
    steps = {name: _step(backend, name) for name in STEPS}
    return {"left_out": sorted(left_out), "ends": sorted(ends), "steps": steps, "rest": _rest(backend)}


@dataclass(frozen=True)
class LightTokenizer:
    """A tokenizer by the Rust library; `left_out` of texts are these tokens, and at their end `ends`."""

    tokenizer: Any
    left_out: frozenset[int]
    ends: frozenset[int]

    @classmethod
    def of(cls, folder: str, told: Mapping[str, Any] | None) -> LightTokenizer | None:
        """Open a tokenizer's file; `told`: what a replica said of it. None where it would not do the same."""
        if told is None or (file := tokenizer_file(folder)) is None:
            return None
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        if any(_step(tokenizer, name) != told["steps"][name] for name in STEPS):
            whole = json.loads(file.read_text(encoding="utf-8")) | told["steps"]
            tokenizer = Tokenizer.from_str(json.dumps(whole))
        if _rest(tokenizer) != told["rest"]:
            return None
        return cls(tokenizer, frozenset(told["left_out"]), frozenset(told["ends"]))

    def encoded(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @property
    def decoded(self) -> Callable[[Sequence[int]], str]:
        """What makes the text of token ids, as `decoder` does."""
        return lambda ids: text_of(self.tokenizer, self.left_out, self.ends, ids)


def _step(backend: Any, name: str) -> Any:
    step = getattr(backend, name)
    return None if step is None else json.loads(step.__getstate__())


def _rest(backend: Any) -> list[Any]:
    """Return what else says what a tokenizer does: its model's options, how many tokens it has, and those added."""
    model, added = backend.model, backend.get_added_tokens_decoder()
    options = [type(model).__name__, *(getattr(model, name, None) or None for name in MODEL)]
    return [*options, backend.get_vocab_size(), [[i, added[i].content, added[i].special] for i in sorted(added)]]
