"""A training batch: sequences of prompt and response, with what a loss needs per response token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.row import BatchRow, rows_of
from rlbench.data.record.origin import keeps_makers
from rlbench.errors import DataError, Suggesting
from rlbench.units import format_number


@dataclass(frozen=True, eq=False)
class TrainBatch(Suggesting):
    """B sequences as ragged arrays; a value: every change gives a new batch.

    `prompts`, `responses`: token ids, int32. Over response tokens: `mask` bool (True where trained), `advantages`,
    `sampler_logprobs` and, where known, `old_logprobs`, `ref_logprobs`, all float32, flat in the order of
    `responses.values`. Per sequence: `rewards` float64 or None, `group` int32, `weight_version` int64.
    `temperature` is the sampler's: the trainer divides its logits by it, so that both speak of one distribution.
    `reshaped_by`: other sampling options, as `top_p=0.9`, that make `sampler_logprobs` those of another distribution.
    """

    prompts: Ragged
    responses: Ragged
    mask: np.ndarray
    advantages: np.ndarray
    sampler_logprobs: np.ndarray
    group: np.ndarray
    weight_version: np.ndarray
    rewards: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    truncated: np.ndarray | None = None
    temperature: float = 1.0
    reshaped_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.responses):
            raise DataError(f"{len(self.prompts)} prompts but {len(self.responses)} responses")
        for names, count, what in ((PER_TOKEN, self.tokens, "response tokens"), (PER_ROW, len(self), "sequences")):
            for name in names:
                if (value := getattr(self, name)) is not None and value.shape != (count,):
                    raise DataError(f"{name} has shape {value.shape} for {count} {what}")

    def __len__(self) -> int:
        return len(self.responses)

    def __repr__(self) -> str:
        reward = ""
        if self.rewards is not None and len(self):
            reward = f", reward {format_number(float(self.rewards.mean()))}"
        trained = int(self.mask.sum())
        return f"TrainBatch({len(self)} sequences, {self.tokens} response tokens, {trained} trained{reward})"

    @property
    def tokens(self) -> int:
        """Response tokens in all."""
        return len(self.responses.values)

    @property
    def response_lengths(self) -> np.ndarray:
        """(B,) int64."""
        return self.responses.lengths

    @property
    def lengths(self) -> np.ndarray:
        """Prompt plus response, (B,) int64."""
        return self.prompts.lengths + self.responses.lengths

    @cached_property
    def key(self) -> str:
        """Identity of the sampled tokens: what old log-probs belong to, whatever the advantages or the mask."""
        digest = hashlib.sha256()
        prompts, responses = self.prompts, self.responses
        parts = (prompts.offsets, prompts.values, responses.offsets, responses.values, self.sampler_logprobs)
        for part in parts:
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]

    @keeps_makers
    def rows(self, indices: np.ndarray | list[int]) -> TrainBatch:
        """The given sequences, in the given order."""
        rows = np.asarray(indices, np.int64)
        chosen: dict[str, Any] = {name: self.responses.pick(getattr(self, name), rows) for name in PER_TOKEN}
        chosen |= {name: value[rows] for name in PER_ROW if (value := getattr(self, name)) is not None}
        return replace(self, prompts=self.prompts.take(rows), responses=self.responses.take(rows), **chosen)

    def __getitem__(self, index: Any) -> TrainBatch:
        """A slice, a boolean mask or a list of rows gives a batch of those sequences."""
        rows = np.arange(len(self))[index]
        return self.rows(np.atleast_1d(rows))

    def select(self, keep: np.ndarray | Callable[[BatchRow], Any]) -> TrainBatch:
        """The sequences for which `keep` (a (B,) bool array, or a function of a `BatchRow`) holds."""
        mask = np.array([bool(keep(row)) for row in rows_of(self)], bool) if callable(keep) else np.asarray(keep, bool)
        if mask.shape != (len(self),):
            raise DataError(f"select: wanted {len(self)} booleans, got shape {mask.shape}")
        return self.rows(np.flatnonzero(mask))

    @keeps_makers
    def replace(self, **fields: Any) -> TrainBatch:
        """A new batch with other fields, e.g. `batch.replace(advantages=…)`."""
        return replace(self, **fields)

    @keeps_makers
    def join(self, *others: TrainBatch, drop_unknown: bool = False) -> TrainBatch:
        """This batch's sequences, then the others'; groups stay apart. See `rlbench.data.join`."""
        from rlbench.data.joining import join

        return join(self, *others, drop_unknown=drop_unknown)

    def __add__(self, other: TrainBatch) -> TrainBatch:
        return self.join(other) if isinstance(other, TrainBatch) else NotImplemented

    def to_parquet(self, path: str | Path) -> Path:
        """Write the batch to one Parquet file, one row per sequence; `from_parquet` gives an equal batch back."""
        from rlbench.data.batches.file import write_batch

        return write_batch(self, path)

    @classmethod
    def from_parquet(cls, path: str | Path) -> TrainBatch:
        """Read what `to_parquet` wrote. Raises DataError for any other file."""
        from rlbench.data.batches.file import read_batch

        return read_batch(path)


PER_TOKEN = ("mask", "advantages", "sampler_logprobs", "old_logprobs", "ref_logprobs")
PER_ROW = ("group", "weight_version", "rewards", "truncated")
