"""The text of an answer, made once when it is whole: what vLLM makes of it token by token as they come, which takes a
fifteenth of a small model's time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

CUT = "\N{REPLACEMENT CHARACTER}"
TAIL = 16
"""Last tokens of a prompt among which a character may have begun."""


class WholeTexts:
    """Makes texts by a tokenizer of transformers'."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._by_bytes = decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"

    def takes(self, params: SamplingParams) -> bool:
        """Whether the answers to a request are the same made whole: nobody looks at its text before its end, and each
        token stands for its own bytes."""
        at_the_end = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop
        return self._by_bytes and at_the_end and params.skip_special_tokens and params.detokenize

    def of(self, part: Any, prompt: Sequence[int], params: SamplingParams) -> str:
        """Return the text of one answer to a prompt, without the token that ended it unless that was asked for."""
        ended = part.finish_reason == "stop" and not params.include_stop_str_in_output
        ids = list(part.token_ids)
        text = self._text(ids[:-1] if ended else ids)
        cut = CUT in text or self._text(prompt[-TAIL:]).endswith(CUT)
        return self._by_token(ids, ended, prompt, params) if cut else text

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _by_token(self, ids: list[int], ended: bool, prompt: Sequence[int], params: SamplingParams) -> str:
        """Return the same by vLLM's own means: a character may have begun in the prompt, or not have ended."""
        request: Any = SimpleNamespace(request_id="", prompt_token_ids=list(prompt), sampling_params=params)
        detokenizer = FastIncrementalDetokenizer(self._tokenizer, request)
        detokenizer.update(ids, ended)
        return str(detokenizer.output_text)
