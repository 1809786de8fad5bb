"""What a loss wants to know of the whole optimizer step before its first micro-batch: `Loss.plan`.

A quantile, a top fraction or a batch mean cannot be had from one micro-batch of one rank. So the batch is scored
once without gradient, every rank puts the same whole together, and each micro-batch later finds its part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import LossError
from rlbench.rl import LossInputs


class StepPlan:
    """The channels of a whole step, (B, longest response) each; a micro-batch takes its rows."""

    def __init__(self, channels: dict[str, Tensor]) -> None:
        self._channels = channels

    def of(self, rows: np.ndarray, like: Tensor) -> dict[str, Tensor]:
        """The channels of the given sequences, in the shape and on the device of `like` (S, T)."""
        picked = torch.from_numpy(np.asarray(rows, np.int64))
        return {name: values[picked, : like.shape[1]].to(like.device) for name, values in self._channels.items()}


NO_PLAN = StepPlan({})


def plan_step(loss: Any, batch: TrainBatch, parts: list[dict[str, Any]], old: str) -> StepPlan:
    """Ask the loss for its plan of `batch`.

    Args:
        loss: one with `plan`.
        batch: the whole batch.
        parts: what `PolicyPass.score` gave on every rank: `rows` and their `channels`.
        old: what stands in for old log-probs where the batch has none, "current" or "sampler".

    Raises:
        LossError: the plan is no dict of (B, longest response) tensors; whatever the loss raises.
    """
    whole = whole_inputs(batch, parts, old)
    channels = loss.plan(whole)
    shape = tuple(whole.mask.shape)
    wrong = not isinstance(channels, dict) or [
        name for name, value in channels.items() if not isinstance(value, Tensor) or tuple(value.shape) != shape
    ]
    if wrong:
        raise LossError(
            f"the loss's plan gave {wrong if isinstance(wrong, list) else type(channels).__name__}; "
            f"wanted a dict of tensors of shape {shape}, (sequences, tokens) of the whole step."
        )
    return StepPlan(channels)


def whole_inputs(batch: TrainBatch, parts: list[dict[str, Any]], old: str) -> LossInputs:
    """The whole batch as a loss sees it, on the host and without gradient."""
    logprobs, entropy = (_in_order(parts, name) for name in ("logprobs", "entropy"))
    stand_in = batch.sampler_logprobs if old == "sampler" else logprobs

    def padded(values: np.ndarray) -> Tensor:
        return pad_rows(batch.responses.with_values(values))

    return LossInputs(
        logprobs=padded(logprobs),
        entropy=padded(entropy),
        old_logprobs=padded(stand_in if batch.old_logprobs is None else batch.old_logprobs),
        sampler_logprobs=padded(batch.sampler_logprobs),
        ref_logprobs=None if batch.ref_logprobs is None else padded(batch.ref_logprobs),
        advantages=padded(batch.advantages),
        mask=padded(batch.mask) > 0,
        group=torch.from_numpy(batch.group.astype(np.int64)),
    )


def pad_rows(rows: Ragged) -> Tensor:
    """Rows of any lengths as (rows, longest) float32, zeros behind each."""
    lengths = torch.from_numpy(rows.lengths)
    width = max(1, int(lengths.max()))
    out = torch.zeros(len(rows), width)
    out[torch.arange(width)[None] < lengths[:, None]] = torch.from_numpy(np.array(rows.values, np.float32))
    return out


def _in_order(parts: list[dict[str, Any]], name: str) -> np.ndarray:
    """A channel of all ranks, flat in the batch's order. A row that several ranks computed counts once."""
    by_row = {
        int(row): values for part in parts for row, values in zip(part["rows"], part["channels"][name], strict=True)
    }
    return np.concatenate([by_row[row] for row in sorted(by_row)])
