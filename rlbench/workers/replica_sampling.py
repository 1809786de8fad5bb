"""Sampling with a transformers model: one left-padded batch, a KV cache, a random generator per sample.

transformers' own `generate` draws a whole batch from one global generator, so a sample would depend on its
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from rlbench.data.sampling import DEFAULT_MAX_TOKENS
from rlbench.workers.replica_job import Sample

OPTIONS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
]


@dataclass(frozen=True)
class SamplingOptions:
    """What shapes the distribution and what ends a sample. `max_tokens` None: up to the model's length."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probs (batch, vocabulary), float32, of the distribution that is sampled from."""
        logits = logits.float()
        if self.temperature > 0:
            logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p < 1:
            logits = _keep_top_p(logits, self.top_p)
        if self.min_p > 0:
            probs = logits.softmax(-1)
            logits = logits.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), -torch.inf)
        return logits.log_softmax(-1)


class BatchSampler:
    """Draws one batch of samples, step by step; finished rows leave the batch.

    Args:
        model: a causal language model of transformers.
        options: shared by all samples.
        max_model_len: longest prompt plus response.
        decode: token ids to text; needed for stop strings only.
    """

    def __init__(
        self, model: Any, options: SamplingOptions, max_model_len: int, decode: Callable[[list[int]], str]
    ) -> None:
        self.model = model
        self.options = options
        self.max_model_len = max_model_len
        self.decode = decode
        self.rows: list[_Row] = []

    @torch.no_grad()
    def start(self, samples: list[Sample], prompts: list[list[int]], seeds: list[int]) -> None:
        """Prefill a new batch: one prompt and one seed per sample."""
        device = self.model.device
        limit = self.options.max_tokens or self.max_model_len
        self.rows = [
            _Row(s, torch.Generator().manual_seed(seed), min(limit, self.max_model_len - len(prompt)))
            for s, prompt, seed in zip(samples, prompts, seeds, strict=True)
        ]
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        self._mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            self._mask[row, width - len(prompt) :] = 1
        self._mask = self._mask.to(device)
        self._cache = DynamicCache(config=self.model.config)
        self._next = self._forward(ids.to(device), (self._mask.cumsum(-1) - 1).clamp(min=0))

    @torch.no_grad()
    def step(self) -> int:
        """Draw one token for every running sample; return how many were drawn."""
        tokens = self._draw(self._next)
        drawn = len(tokens)
        keep = [index for index, row in enumerate(self.rows) if not self._ended(row)]
        if len(keep) < drawn:
            self.rows = [self.rows[index] for index in keep]
            rows = torch.tensor(keep, dtype=torch.long, device=self._mask.device)
            tokens, self._mask = tokens[rows], self._mask[rows]
            if keep:
                self._cache.batch_select_indices(rows)
        if self.rows:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=-1)
            self._next = self._forward(tokens[:, None], self._mask.sum(-1, keepdim=True) - 1)
        return drawn

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits of the last position (batch, vocabulary)."""
        output = self.model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """One token per row, appended to the samples with its log-prob; (batch,) on the model's device."""
        for index, row in enumerate(self.rows):
            if len(row.sample.tokens) < self.options.min_tokens:
                logits[index, list(self.options.stop_token_ids)] = -torch.inf
        logprobs = self.options.distribution(logits).cpu()
        if self.options.temperature == 0:
            tokens = logprobs.argmax(-1)
        else:
            probs = logprobs.exp()
            drawn = [torch.multinomial(p, 1, generator=row.generator) for p, row in zip(probs, self.rows, strict=True)]
            tokens = torch.cat(drawn)
        values = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        for row, token, value in zip(self.rows, tokens.tolist(), values, strict=True):
            row.sample.tokens.append(token)
            row.sample.logprobs.append(value)
        return tokens.to(logits.device)

    def _ended(self, row: _Row) -> bool:
        """Whether a sample ends with its last token; sets the finish reason, and the text where a stop string
        cut it.
        """
        sample, options = row.sample, self.options
        count = len(sample.tokens)
        if (sample.tokens[-1] in options.stop_token_ids and count >= options.min_tokens) or (
            options.stop and count >= options.min_tokens and self._cut_at_stop_string(sample)
        ):
            sample.finish = "stop"
        elif count >= row.limit:
            sample.finish = "length"
        return bool(sample.finish)

    def _cut_at_stop_string(self, sample: Sample) -> bool:
        text = self.decode(sample.tokens)
        found = [(text.find(stop), stop) for stop in self.options.stop if stop in text]
        if found:
            at, stop = min(found)
            sample.text = [text[: at + len(stop) if self.options.include_stop_str_in_output else at]]
        return bool(found)


@dataclass
class _Row:
    """One running sample, its source of randomness and the most tokens it may have."""

    sample: Sample
    generator: torch.Generator
    limit: int


def _keep_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of tokens whose probabilities add up to `top_p`."""
    ordered, order = logits.sort(-1, descending=True)
    probs = ordered.softmax(-1)
    dropped = probs.cumsum(-1) - probs >= top_p  # the first token always stays
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
