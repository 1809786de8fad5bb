"""The two ends of a generate call: checking what is asked, collecting what was drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlbench.data.base.routing import UNKNOWN, routing_rows
from rlbench.data.prompts.chat import Templated, reads
from rlbench.data.prompts.lengths import begin_text, encoded
from rlbench.data.prompts.sampling import NEUTRAL
from rlbench.data.rollouts.jobs import FINISH_REASONS, GeneratedArrays, GenerateJob
from rlbench.data.rollouts.light import told_of_texts
from rlbench.dispatch.context import CallContext
from rlbench.errors import DataError, nearest

BINS = 24
REPORT_SECONDS = 0.2
TEXTS_REST = 20.0  # times as long as decoding the texts so far took it waits before it does so again
SHOWN_SAMPLES, SHOWN_TOKENS, SHOWN_CHARACTERS = 2, 48, 120
"""Of what is finished first, so much text goes into the progress: it is sent several times a second."""
_PLAIN = ("temperature", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens")
SAMPLING_OPTIONS = (*NEUTRAL, *_PLAIN, "include_stop_str_in_output")
_SET_BY_CALL = {
    "n": "give n to generate() or rollout()",
    "seed": "every sample has a seed of its own, derived from the session's seed",
    "logprobs": "the sampled token's log-prob always comes, and no other",
    "prompt_logprobs": "call logprobs() of the engine",
    "detokenize": "texts are always made, once, at the end",
    "spaces_between_special_tokens": "texts are what the tokenizer makes of the tokens",
    "output_kind": "a call returns whole completions",
}


@dataclass(eq=False)
class Sample:
    """One sample while it is drawn; `stop`: the stop string that ended it, where one did and is no part of its text;
    `routing`: experts (tokens, layers, top_k) of the tokens from the prompt's first on, where the engine gives them."""

    prompt: int
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    stop: str = ""
    routing: np.ndarray | None = None

    def take_routing(self, given: np.ndarray | None, begin: int = 0) -> None:
        """Take the experts that a request brought, whose first token is that at `begin`; what an earlier one said of a
        token, when it was drawn, stays."""
        if given is None:
            return
        before = np.zeros((0, *given.shape[1:]), np.int16) if self.routing is None else self.routing
        unsaid = np.full((max(begin - len(before), 0), *given.shape[1:]), UNKNOWN, np.int16)  # of the token drawn last
        known = max(len(before) - begin, 0)
        self.routing = np.concatenate([before, unsaid, given[known:].astype(np.int16)])


def check_job(job: GenerateJob) -> None:
    """Refuse what no engine can serve."""
    for name in job.sampling:
        if name in _SET_BY_CALL:
            raise DataError(f"sampling option {name!r}: {_SET_BY_CALL[name]}")
        if name not in SAMPLING_OPTIONS:
            raise DataError(f"unknown sampling option {name!r}{nearest(name, SAMPLING_OPTIONS)}")


def told_of(tokenizer: Any) -> dict[str, Any]:
    """Return what a driver, which opens no tokenizer of transformers', has to know: how texts begin, whether chats
    name tools, what texts are made of (`data.rollouts.light`)."""
    named = reads(tokenizer, "tools", tools=[])
    return {"begins": begin_text(tokenizer), "names_tools": named, "texts": told_of_texts(tokenizer)}


def encode_job(
    job: GenerateJob, tokenizer: Any, max_model_len: int, vocab_size: int
) -> tuple[list[list[int]], list[Any]]:
    """Return the token ids of every prompt, as `encode_prompts` does, and by prompt the tokenizer that writes its
    chat."""
    if not job.tools:
        shared = Templated(tokenizer, job.chat) if job.chat else tokenizer
        return encode_prompts(job.prompts, shared, max_model_len, vocab_size), [shared] * len(job.prompts)
    by_tools = {id(tools): Templated(tokenizer, {**job.chat, "tools": tools}) for tools in job.tools}
    tokenizers = [by_tools[id(tools)] for tools in job.tools]
    rows = [
        encoded([prompt], one, f"prompt {index}".format)[0]
        for index, (prompt, one) in enumerate(zip(job.prompts, tokenizers, strict=True))
    ]
    _check_rows(rows, max_model_len, vocab_size)
    return rows, tokenizers


def encode_prompts(prompts: Sequence[Any], tokenizer: Any, max_model_len: int, vocab_size: int) -> list[list[int]]:
    """Return the token ids of every prompt; refuse one that is empty, too long or outside the vocabulary."""
    rows = encoded(prompts, tokenizer)
    _check_rows(rows, max_model_len, vocab_size)
    return rows


def _check_rows(rows: Sequence[Sequence[int]], max_model_len: int, vocab_size: int) -> None:
    for index, ids in enumerate(rows):
        check_token_ids(ids, f"prompt {index}", max_model_len - 1, max_model_len, vocab_size)


def check_token_ids(ids: Sequence[int], what: str, limit: int, max_model_len: int, vocab_size: int) -> None:
    """Refuse an empty, too long or out-of-vocabulary sequence of token ids."""
    if len(ids) == 0:
        raise DataError(f"{what} is empty: give at least one token")
    if len(ids) > limit:
        raise DataError(
            f"{what} has {len(ids)} tokens, but the model's length is {max_model_len}"
            f"{', which must also hold a response token' if limit < max_model_len else ''}: shorten it, or "
            "build the engine with a larger max_model_len if the model allows it"
        )
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise DataError(f"{what} holds token id {wrong}, outside of the model's vocabulary of {vocab_size}")


def length_histogram(lengths: Sequence[int]) -> dict[str, Any]:
    """Count lengths in at most `BINS` bins of one `width`, a power of two, so that those of replicas can be joined."""
    width = 1 << (max(lengths, default=0) // BINS).bit_length()
    return {"width": width, "counts": np.bincount(np.asarray(lengths, np.int64) // width).tolist()}


class ProgressReporter:
    """Reports to the call's context at most every REPORT_SECONDS; `decode` shows the first samples that finish."""

    def __init__(self, context: CallContext, decode: Callable[[list[int]], str] | None = None) -> None:
        self.context = context
        self.tokens = self.prompt_tokens = self.cached_tokens = 0
        self.started = self._last = time.perf_counter()
        self._decode = decode
        self._lengths: list[int] = []
        self._first: list[str] = []
        self._texts_due = 0.0

    def finish(self, sample: Sample) -> None:
        """A sample is complete: its length counts, and the first ones are shown."""
        self._lengths.append(len(sample.tokens))
        if self._decode is not None and len(self._first) < SHOWN_SAMPLES:
            self._first.append(self._decode(sample.tokens[:SHOWN_TOKENS])[:SHOWN_CHARACTERS])

    def answered(self, output: Any) -> None:
        """A request is over: what it was sampled behind counts, and how much of that was in the prefix cache."""
        self.prompt_tokens += len(output.prompt_token_ids or ())
        self.cached_tokens += output.num_cached_tokens or 0

    def tick(
        self, finished: int, running: int, total: int, *, told: Sequence[Sample] = (), force: bool = False
    ) -> None:
        """Publish the counters when it is time, with the texts so far of `told`."""
        now = time.perf_counter()
        if force or now - self._last >= REPORT_SECONDS:
            self._last = now
            counts: dict[str, Any] = {"tokens": self.tokens, "finished": finished, "total": total, "running": running}
            if told and self._decode is not None and now >= self._texts_due:
                counts["texts"] = [(one.prompt, one.index, self._decode(one.tokens)) for one in told]
                self._texts_due = now + TEXTS_REST * (time.perf_counter() - now)
            self.context.report(**counts, lengths=length_histogram(self._lengths), first=list(self._first))

    @property
    def stats(self) -> dict[str, float]:
        """Tokens drawn, those they were drawn behind, how many of these were in the prefix cache, and seconds."""
        counts = {"tokens": self.tokens, "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens}
        return {name: float(count) for name, count in counts.items()} | {"seconds": time.perf_counter() - self.started}


def collect(
    samples: Sequence[Sample], texts: list[str], prompts: dict[int, list[int]], version: int, stats: dict[str, float]
) -> GeneratedArrays:
    """Join finished and aborted samples into flat arrays. `texts` one per sample, `prompts` token ids by index."""
    lengths = [len(sample.tokens) for sample in samples]
    total = sum(lengths)
    return GeneratedArrays(
        keys=np.array([(s.prompt, s.index) for s in samples], dtype=np.int32).reshape(-1, 2),
        token_ids=np.fromiter((t for s in samples for t in s.tokens), dtype=np.int32, count=total),
        logprobs=np.fromiter((v for s in samples for v in s.logprobs), dtype=np.float32, count=total),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        finish=np.array([FINISH_REASONS.index(s.finish) for s in samples], dtype=np.int8),
        versions=np.full(len(samples), version, dtype=np.int64),
        texts=texts,
        prompt_token_ids={index: prompts[index] for index in sorted({s.prompt for s in samples})},
        stats=stats,
        routing=routing_rows([s.routing for s in samples], [len(prompts[s.prompt]) + len(s.tokens) for s in samples]),
    )


def decode_texts(
    samples: Sequence[Sample], decode: Callable[[list[int]], str], sampling: Mapping[str, Any]
) -> list[str]:
    """Return the text of each sample, up to the stop string that ended it unless the call asked for that too."""
    whole = bool(sampling.get("include_stop_str_in_output"))
    return [_after_all(decode(s.tokens), s.stop) if whole else _before(decode(s.tokens), s.stop) for s in samples]


def _after_all(text: str, stop: str) -> str:
    """Return a text up to the end of its last `stop`, behind which the last token may have more; all without one."""
    head, separator, _ = text.rpartition(stop) if stop else ("", "", text)
    return head + separator if separator else text


def _before(text: str, stop: str) -> str:
    """Return what stands before the last `stop` of a text; all of it without one."""
    head, separator, _ = text.rpartition(stop) if stop else ("", "", text)
    return head if separator else text
