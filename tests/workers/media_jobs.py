"""What tests of replicas that see, watch or hear share: their jobs, and drawn tokens held to transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlbench.data import Prompt
from rlbench.data.rollouts.jobs import GeneratedArrays, GenerateJob

from .turns import Rows
from .turns import job as turns_job


def job(prompts: Sequence[Prompt], n: int = 2, **sampling: Any) -> GenerateJob:
    """A job of prompts with what stands in them."""
    empty = turns_job([[1]] * len(prompts), n=n, **sampling)
    return replace(empty, prompts=[p.content for p in prompts], asked=(), media=tuple(p.media for p in prompts))


def drawn_as_expected(
    replica: Any,
    lane: Any,
    prompts: Sequence[Prompt],
    expected: Callable[[Prompt, list[int]], tuple[list[int], np.ndarray]],
    within: float,
) -> GeneratedArrays:
    """Draw three samples of each prompt, twice alike; token ids are those expected, and so, within so many nats, are
    log-probs: `expected` gives a prompt's token ids and a response's log-probs."""
    arrays: GeneratedArrays = lane(replica.generate, job(prompts, n=3, temperature=1.0))
    rows = Rows(arrays)
    assert sorted(rows.keys) == [(p, s) for p in range(len(prompts)) for s in range(3)]
    for key in rows.keys:
        ids, logprobs = expected(prompts[key[0]], rows.of("token_ids", key))
        assert arrays.prompt_token_ids[key[0]] == ids
        assert rows.of("logprobs", key) == pytest.approx(logprobs.tolist(), abs=within)
    again = Rows(lane(replica.generate, job(prompts, n=3, temperature=1.0)))
    assert all(again.of("token_ids", key) == rows.of("token_ids", key) for key in rows.keys)
    return arrays
