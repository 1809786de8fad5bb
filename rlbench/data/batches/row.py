"""One sequence of a training batch, as a function of it sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rlbench.data.batches.batch import TrainBatch


@dataclass(frozen=True, eq=False)
class BatchRow:
    """Sequence `index` of a `TrainBatch` of T response tokens; arrays are views, None where the batch knows none.

    `prompt`, `response`: token ids, int32. Over the response, (T,): `mask`, `advantages`, `sampler_logprobs`,
    `old_logprobs`, `ref_logprobs` as in the batch. `group`, `weight_version`, `reward`, `truncated`: this sequence's.
    """

    index: int
    prompt: np.ndarray
    response: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    sampler_logprobs: np.ndarray
    old_logprobs: np.ndarray | None
    ref_logprobs: np.ndarray | None
    group: int
    weight_version: int
    reward: float | None
    truncated: bool | None

    def __len__(self) -> int:
        return len(self.response)


def rows_of(batch: TrainBatch) -> Iterator[BatchRow]:
    """The sequences of a batch, in order."""
    ends = batch.responses.offsets
    for i in range(len(batch)):
        span = slice(int(ends[i]), int(ends[i + 1]))
        yield BatchRow(
            index=i,
            prompt=batch.prompts[i],
            response=batch.responses[i],
            mask=batch.mask[span],
            advantages=batch.advantages[span],
            sampler_logprobs=batch.sampler_logprobs[span],
            old_logprobs=None if batch.old_logprobs is None else batch.old_logprobs[span],
            ref_logprobs=None if batch.ref_logprobs is None else batch.ref_logprobs[span],
            group=int(batch.group[i]),
            weight_version=int(batch.weight_version[i]),
            reward=None if batch.rewards is None else float(batch.rewards[i]),
            truncated=None if batch.truncated is None else bool(batch.truncated[i]),
        )
