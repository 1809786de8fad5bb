"""The two ends of a generate call: checking what is asked, collecting what was drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlbench.data.prompts.lengths import encoded
from rlbench.data.rollouts.jobs import FINISH_REASONS, GeneratedArrays, GenerateJob
from rlbench.dispatch.context import CallContext
from rlbench.errors import DataError, nearest

REPORT_SECONDS = 0.2
SHOWN_SAMPLES, SHOWN_TOKENS, SHOWN_CHARACTERS = 2, 48, 120
"""Of what is finished first, so much text goes into the progress: it is sent several times a second."""
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
    """One sample while it is drawn: tokens, their log-probs and, where the engine makes it, its text."""

    prompt: int
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: str = ""


def check_job(job: GenerateJob, known_options: Iterable[str]) -> None:
    """Refuse what no engine can serve. Raises DataError with one sentence naming the mend."""
    if not job.prompts:
        raise DataError("the prompt list is empty: give at least one prompt")
    if job.n < 1:
        raise DataError(f"n={job.n}: draw at least one sample per prompt")
    if job.seeds.shape != (len(job.prompts), job.n):
        raise DataError(f"seeds have shape {job.seeds.shape}, wanted {(len(job.prompts), job.n)}: one per sample")
    known = set(known_options)
    for name in job.sampling:
        if name in _SET_BY_CALL:
            raise DataError(f"sampling option {name!r}: {_SET_BY_CALL[name]}")
        if name not in known:
            raise DataError(f"unknown sampling option {name!r}{nearest(name, known)}")
    for name, least in (("max_tokens", 1), ("min_tokens", 0), ("temperature", 0)):
        value = job.sampling.get(name)
        if value is not None and value < least:
            raise DataError(f"sampling option {name}={value} must be at least {least}")


def encode_prompts(prompts: Sequence[Any], tokenizer: Any, max_model_len: int, vocab_size: int) -> list[list[int]]:
    """Return the token ids of every prompt; refuse one that is empty, too long or outside the vocabulary."""
    found = encoded(prompts, tokenizer)
    for index, ids in enumerate(found):
        check_token_ids(ids, f"prompt {index}", max_model_len - 1, max_model_len, vocab_size)
    return found


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
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise DataError(f"{what} holds token id {wrong}, outside of the model's vocabulary of {vocab_size}")


class GrowingHistogram:
    """Counts of lengths in at most `BINS` bins of one width, a power of two that doubles when a length is beyond.

    So histograms of several replicas can be joined, and nobody need know the longest before.
    """

    BINS = 24

    def __init__(self) -> None:
        self.width = 1
        self.counts = [0] * self.BINS

    def add(self, length: int) -> None:
        """Count one sample of `length` tokens."""
        while length >= self.width * self.BINS:
            pairs = zip(self.counts[::2], self.counts[1::2], strict=True)
            self.counts = [a + b for a, b in pairs] + [0] * (self.BINS // 2)
            self.width *= 2
        self.counts[length // self.width] += 1

    def plain(self) -> dict[str, Any]:
        """`counts[i]` samples of `i * width` to below `(i + 1) * width` tokens; empty bins at the end are left out."""
        used = max((i + 1 for i, count in enumerate(self.counts) if count), default=0)
        return {"width": self.width, "counts": self.counts[:used]}


class Progress:
    """Reports to the call's context at most every REPORT_SECONDS.

    Args:
        decode: token ids to text, for the first samples that finish; None: their texts are not shown.
    """

    def __init__(self, context: CallContext, decode: Callable[[list[int]], str] | None = None) -> None:
        self.context = context
        self.tokens = 0
        self.started = self._last = time.perf_counter()
        self._decode = decode
        self._lengths = GrowingHistogram()
        self._first: list[str] = []

    def finish(self, sample: Sample) -> None:
        """A sample is complete: its length counts, and the first ones are shown."""
        self._lengths.add(len(sample.tokens))
        if self._decode is not None and len(self._first) < SHOWN_SAMPLES:
            self._first.append(self._decode(sample.tokens[:SHOWN_TOKENS])[:SHOWN_CHARACTERS])

    def tick(self, finished: int, running: int, total: int, *, force: bool = False) -> None:
        """Publish the counters when it is time."""
        now = time.perf_counter()
        if force or now - self._last >= REPORT_SECONDS:
            self._last = now
            self.context.report(
                tokens=self.tokens,
                finished=finished,
                total=total,
                running=running,
                lengths=self._lengths.plain(),
                first=list(self._first),
            )

    @property
    def stats(self) -> dict[str, float]:
        """Tokens drawn and seconds since the start."""
        return {"tokens": float(self.tokens), "seconds": time.perf_counter() - self.started}


def collect(
    samples: Sequence[Sample],
    texts: list[str],
    prompts: dict[int, list[int]],
    version: int,
    stats: dict[str, float],
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
    )


def decode_texts(samples: Sequence[Sample], tokenizer: Any, skip_special_tokens: bool) -> list[str]:
    """Text of each sample: what the engine streamed (stop strings removed) where it did, else decoded from its ids."""
    if tokenizer is None:
        return ["" for _ in samples]
    return [
        "".join(s.text)
        if s.text and s.finish != "abort"
        else tokenizer.decode(s.tokens, skip_special_tokens=skip_special_tokens)
        for s in samples
    ]
