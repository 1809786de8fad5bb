"""What a loss sees of a batch: a micro-batch, or the whole optimizer step before its first one (`Loss.plan`)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbench.data.base.ragged import rows_in_order
from rlbench.data.batches.batch import TrainBatch
from rlbench.data.batches.columns import TEACHER, TEACHER_IDS, TEACHER_TOP
from rlbench.errors import LossError
from rlbench.rl import BatchTotals, LossInputs
from rlbench.rl.types import TeacherTokens
from rlbench.trainers.passes.metrics import own_name
from rlbench.trainers.passes.outputs import ASKED_FOR, TokenOutputs
from rlbench.trainers.passes.packing import Grid
from rlbench.trainers.passes.packing import pad_rows as pad_rows


@dataclass(frozen=True)
class Slice:
    """Sequences that go through one pass, and their rows in the whole call; int64."""

    batch: TrainBatch
    rows: np.ndarray


def totals_of(batch: TrainBatch) -> BatchTotals:
    """Size of a batch, as `BatchTotals.of` counts it."""
    owner = np.repeat(np.arange(len(batch)), batch.response_lengths)[batch.mask]
    numbers, tokens = np.unique(batch.group[owner], return_counts=True)
    return BatchTotals(
        tokens=int(batch.mask.sum()),
        sequences=len(np.unique(owner)),
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


def loss_inputs(batch: TrainBatch, found: TokenOutputs, grid: Grid, old: str) -> LossInputs:
    """Pad a batch, with what a pass gave of its tokens, to what a loss sees.

    `old` stands in where the batch has no old log-probs: "recompute", this pass's, or "sampler".
    """
    padded, logprobs, device = grid.pad_numbers, found.logprobs, found.logprobs.device
    said = None if batch.verdicts is None else batch.verdicts.weighed()
    known = batch.sampler_logprobs if batch.old_logprobs is None and old == "sampler" else batch.old_logprobs
    return LossInputs(
        logprobs=grid.pad(logprobs),
        old_logprobs=grid.pad(logprobs.detach()) if known is None else padded(known),
        sampler_logprobs=padded(batch.sampler_logprobs),
        ref_logprobs=None if batch.ref_logprobs is None else padded(batch.ref_logprobs),
        advantages=padded(batch.advantages),
        mask=padded(batch.mask) > 0,
        entropy=grid.pad(found.entropy),
        group=_of_rows(batch.group, np.int64, device),
        preference=None if batch.preference is None else _of_rows(batch.preference, np.int64, device),
        pair=None if batch.pair is None else _of_rows(batch.pair, np.int64, device),
        margin=None if batch.margin is None else _of_rows(batch.margin, np.float32, device),
        lengths=_of_rows(batch.response_lengths, np.int64, device),
        channels={name: grid.pad(torch.from_numpy(values).to(device)) for name, values in batch.columns.items()},
        columns=tuple(batch.columns),
        hidden_states=None if found.hidden_states is None else grid.pad(found.hidden_states),
        logits=None if found.logits is None else grid.pad(found.logits),
        scores=None if found.scores is None else grid.pad(found.scores),
        head_scores=None if found.head_scores is None else grid.pad(found.head_scores),
        heads=None if said is None else said.heads,
        verdicts=None if said is None else _of_rows(said.values, np.float32, device),
        verdict_weights=None if said is None or said.weights is None else _of_rows(said.weights, np.float32, device),
        teacher=_teacher_tokens(batch, found, grid),
    )


def _teacher_tokens(batch: TrainBatch, found: TokenOutputs, grid: Grid) -> TeacherTokens | None:
    """What the batch's columns know of a teacher, with the policy's log-probs where the pass gave them."""
    if TEACHER not in batch.columns:
        return None
    ids, top = batch.columns.get(TEACHER_IDS), batch.columns.get(TEACHER_TOP)
    of_policy, device = found.candidate_logprobs, found.logprobs.device
    return TeacherTokens(
        logprobs=grid.pad_numbers(batch.columns[TEACHER]),
        ids=None if ids is None else grid.pad(torch.from_numpy(ids).to(device, torch.int64)),
        top_logprobs=None if top is None else grid.pad(torch.from_numpy(top).to(device)),
        policy_logprobs=None if of_policy is None else grid.pad(of_policy),
    )


def _of_rows(values: np.ndarray, dtype: type, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(dtype)).to(device)


def tokens_of_loss(view: LossInputs, own: dict[str, Any], grid: Grid) -> dict[str, Tensor]:
    """What the loss compared with and what it said, flat: old and reference log-probs, its metrics per token, and on
    each token those of its sequence."""
    policy = {"old_logprobs": view.old_logprobs, "ref_logprobs": view.ref_logprobs}
    channels: dict[str, Tensor | None] = {} if view.scores is not None else {**policy}
    for name, value in own.items():
        if isinstance(value, Tensor) and value.shape in (view.mask.shape, (len(view.mask), 1)):
            channels[own_name(name)] = value.expand(view.mask.shape)
    return {name: grid.flat(value) for name, value in channels.items() if value is not None}


def plan_step(loss: Any, batch: TrainBatch, parts: list[dict[str, Any]], old: str) -> dict[str, Tensor]:
    """Ask a loss that must see the whole step (for a quantile, a batch mean) for its plan: channels of all of `batch`.

    `parts`: what `PolicyPass.score` gave on every rank.
    """
    whole = whole_inputs(batch, parts, old)
    channels: dict[str, Tensor] = loss.plan(whole)
    shape = tuple(whole.mask.shape)
    wrong = not isinstance(channels, dict) or [
        name for name, value in channels.items() if not isinstance(value, Tensor) or tuple(value.shape) != shape
    ]
    if wrong:
        raise LossError(
            f"the loss's plan gave {wrong if isinstance(wrong, list) else type(channels).__name__}; "
            f"wanted a dict of tensors of shape {shape}, (sequences, tokens) of the whole step."
        )
    return channels


def whole_inputs(batch: TrainBatch, parts: list[dict[str, Any]], old: str) -> LossInputs:
    """The whole batch as a loss sees it, on the host and without gradient; a row that several ranks computed counts
    once."""
    joined = rows_in_order(parts)
    names = [name for name in ("logprobs", "entropy", "scores", "head_scores", *ASKED_FOR) if name in joined]
    given = {name: torch.from_numpy(joined[name].values) for name in names}
    if "scores" in given:
        given["logprobs"] = given["entropy"] = torch.full_like(given["scores"], torch.nan)
    found = TokenOutputs(**given)
    return loss_inputs(batch, found, Grid.of(batch.responses), old)
