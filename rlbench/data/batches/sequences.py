"""Token sequences as a batch, to be scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.batch import TrainBatch


def as_batch(sequences: Sequence[Any]) -> TrainBatch:
    """Make a batch whose responses are all tokens after each sequence's first."""
    return to_score([row[:1] for row in sequences], [row[1:] for row in sequences])


def to_score(prompts: Sequence[Any], responses: Sequence[Any], temperature: float = 1.0) -> TrainBatch:
    """Make a batch of rows of token ids, of which the responses are to be scored."""
    tokens, rows = sum(map(len, responses)), len(responses)
    zeros = np.zeros(tokens, np.float32)
    return TrainBatch(
        prompts=Ragged.from_rows(prompts, np.int32),
        responses=Ragged.from_rows(responses, np.int32),
        mask=np.ones(tokens, bool),
        advantages=zeros,
        sampler_logprobs=zeros,
        group=np.zeros(rows, np.int32),
        weight_version=np.zeros(rows, np.int64),
        temperature=temperature,
    )
