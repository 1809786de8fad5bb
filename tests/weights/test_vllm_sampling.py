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


@pytest.mark.parametrize("caching", [True, False])
def test_samples_get_the_blocks_that_vllm_gives_them(caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, samples of different lengths, one after the other out of a cache that is too small for all:
    blocks, what is known of them and what is free are the same after each call, and few calls go vLLM's long way."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from rlbench.weights import vllm_sampling

    stock = vllm_sampling._allocate
    long_ways: list[int] = []
    monkeypatch.setattr(vllm_sampling, "_allocate", lambda *a, **k: (long_ways.append(1), stock(*a, **k))[1])
    seen = []
    for allocate in (stock, vllm_sampling._allocate_where_full):
        monkeypatch.setattr(KVCacheManager, "allocate_slots", allocate)
        seen.append(_blocks_of_samples(caching))
    assert seen[0] == seen[1]
    assert len(long_ways) < 0.6 * len(seen[1])
    assert any(known for _, _, known, _ in seen[1]) == caching


def _blocks_of_samples(caching: bool) -> list[Any]:
    """Schedule six requests by turns; return what each call gave, and how the cache was after it."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request, RequestStatus

    block, draws = 4, np.random.default_rng(0)
    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheManager(KVCacheConfig(24, [], [KVCacheGroupSpec(["layer"], spec)]), 64, block, block, None, caching)
    manager, steps = cache.coordinator.single_type_managers[0], []
    hasher = get_request_block_hasher(block, sha256) if caching else None

    def note(request: Request, given: Any) -> bool:
        held = [one.block_id for one in manager.req_to_blocks[request.request_id]]
        ids = None if given is None else given.get_block_ids()
        steps.append((ids, held, dict(manager.num_cached_block), cache.block_pool.get_num_free_blocks()))
        return given is not None

    requests = []
    for number in range(6):
        prompt = [1, 2, 3, 4, 5, *draws.integers(9, size=draws.integers(1, 12)).tolist()]  # the first block is shared
        request = Request(str(number), prompt, SamplingParams(max_tokens=40), None, block_hasher=hasher)
        shared, known, *_ = cache.get_computed_blocks(request)
        first = min(6, len(prompt) - known)
        assert note(request, cache.allocate_slots(request, first, known, shared))
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, known + first
        requests.append(request)
    for _ in range(40):
        for request in list(requests):
            left = request.num_tokens - request.num_computed_tokens
            new = min(3, left) if left else 1
            if not left:
                request.append_output_token_ids(int(draws.integers(9)))
            if note(request, cache.allocate_slots(request, new, num_lookahead_tokens=0)):
                request.num_computed_tokens += new
            else:  # the cache is full: it makes room for the others
                cache.free(request)
                requests.remove(request)
    return steps
