"""The short ways through vLLM's sampler: draws, log-probs and records are those of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.engine

ROWS, VOCABULARY, STEPS = 5, 40, 4


def generators() -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(row) for row in range(ROWS) if row != 2}  # one draws without a seed


@pytest.mark.parametrize("top", [{"k": None, "p": None}, {"k": torch.full((ROWS,), 7), "p": torch.full((ROWS,), 0.8)}])
def test_seeded_draws_and_their_logprobs_are_vllms_own(top: dict[str, Any]) -> None:
    import vllm.v1.worker.cpu_worker  # noqa: F401  # has the kernel for a host
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from rlbench.weights.vllm_sampling import draw_by_seeds

    logits = torch.randn(STEPS, ROWS, VOCABULARY)
    drawn = []
    for changed in (False, True):
        sampler, own = TopKTopPSampler("processed_logprobs"), generators()
        stock = sampler.forward
        if changed:
            draw_by_seeds(sampler)
            assert sampler.forward != stock
        torch.manual_seed(3)
        drawn.append([sampler.forward(step.clone(), own, **top) for step in logits])
    for (tokens, logprobs), (expected, expected_logprobs) in zip(*drawn, strict=True):
        assert torch.equal(tokens, expected) and torch.equal(logprobs, expected_logprobs)


def test_raw_modes_are_left_to_vllm() -> None:
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from rlbench.weights.vllm_sampling import draw_by_seeds

    sampler = TopKTopPSampler("raw_logprobs")
    draw_by_seeds(sampler)
    assert sampler.forward(torch.randn(ROWS, VOCABULARY), generators(), None, None)[1] is None


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("flat", [True, False])
def test_what_is_recorded_of_a_sample_is_what_vllm_records(others: int, flat: bool) -> None:
    from vllm.logprobs import create_sample_logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    from rlbench.weights import vllm_sampling

    draws = np.random.default_rng(0)
    columns = 3 + 1  # another request of the step asks for three
    steps = [
        LogprobsLists(draws.integers(0, 99, (2, columns)), draws.normal(size=(2, columns)), draws.integers(1, 9, 2))
        for _ in range(STEPS)
    ]
    recorded = []
    for update in (vllm_sampling._update, vllm_sampling._record):
        processor = LogprobsProcessor(None, create_sample_logprobs(flat), None, 0.0, others, None)
        for step in steps:
            update(processor, step)
        recorded.append((processor.cumulative_logprob, processor.logprobs))
    assert recorded[0] == recorded[1]
