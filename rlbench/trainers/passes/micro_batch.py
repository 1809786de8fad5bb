"""Micro-batches: what a rank takes through one pass, what a loss sees of it, and what the loss says of each token."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbench.data.batches.batch import TrainBatch
from rlbench.rl import BatchTotals, LossInputs
from rlbench.trainers.passes.metrics import own_name
from rlbench.trainers.passes.packing import Grid, ModelInputs


@dataclass(frozen=True)
class Slice:
    """Sequences that go through one pass, and their rows in the whole call; int64."""

    batch: TrainBatch
    rows: np.ndarray


def totals_of(batch: TrainBatch) -> BatchTotals:
    """Size of a batch, as `BatchTotals.of` counts it."""
    owner = np.repeat(np.arange(len(batch)), batch.response_lengths)
    trained = np.unique(owner[batch.mask])
    numbers, tokens = np.unique(batch.group[owner[batch.mask]], return_counts=True)
    return BatchTotals(
        tokens=int(batch.mask.sum()),
        sequences=len(trained),
        max_length=int(batch.response_lengths.max()),
        prompts=len(numbers),
        prompt_tokens=dict(zip(numbers.tolist(), tokens.tolist(), strict=True)),
    )


def prompts_of(batch: TrainBatch, numbered_anew: bool) -> frozenset[tuple[int, int]]:
    """What tells the prompts of a step apart: the group's number; with `numbered_anew`, where each call counts its
    groups from 0, also the prompt's tokens."""
    if not numbered_anew:
        return frozenset((number, 0) for number in batch.group.tolist())
    rows = zip(batch.group.tolist(), batch.prompts, strict=True)
    return frozenset((number, zlib.crc32(np.ascontiguousarray(ids).tobytes())) for number, ids in rows)


def loss_inputs(
    part: TrainBatch, logprobs: Tensor, entropy: Tensor, inputs: ModelInputs, old_logprobs: str
) -> LossInputs:
    """The padded view that a loss sees; `old_logprobs` is `PolicyOptions.old_logprobs`."""
    pad = inputs.grid.pad

    def given(values: np.ndarray) -> Tensor:
        return pad(torch.from_numpy(np.array(values, np.float32)).to(logprobs.device))

    mask = torch.from_numpy(np.array(part.mask, bool)).to(logprobs.device)
    if part.old_logprobs is not None:
        old = given(part.old_logprobs)
    else:
        old = given(part.sampler_logprobs) if old_logprobs == "sampler" else pad(logprobs.detach())
    return LossInputs(
        logprobs=pad(logprobs),
        old_logprobs=old,
        sampler_logprobs=given(part.sampler_logprobs),
        ref_logprobs=None if part.ref_logprobs is None else given(part.ref_logprobs),
        advantages=given(part.advantages),
        mask=pad(mask.float()) > 0,
        entropy=pad(entropy),
        group=torch.from_numpy(part.group.astype(np.int64)).to(logprobs.device),
    )


def tokens_of_loss(view: LossInputs, own: dict[str, Any], grid: Grid) -> dict[str, Tensor]:
    """What the loss compared with and what it said, flat: old and reference log-probs, its metrics per token."""
    channels = {"old_logprobs": view.old_logprobs, "ref_logprobs": view.ref_logprobs}
    channels |= {
        own_name(name): value
        for name, value in own.items()
        if isinstance(value, Tensor) and value.shape == view.mask.shape
    }
    return {name: grid.flat(value) for name, value in channels.items() if value is not None}
