"""What vLLM does for each token of each sample, in fewer steps of Python: the same draws and log-probs to the bit.

On a host, with a small model, these loops take a tenth of a rollout.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.logprobs import FlatLogprobs
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

SEEDS = 2**31  # vLLM's kernel for a host takes a seed below this for each sample
_update = LogprobsProcessor._update_sample_logprobs
_allocate = KVCacheManager.allocate_slots


def draw_by_seeds(sampler: TopKTopPSampler) -> None:
    """Have a sampler for a host take a step's seeds from the samples' generators without a tensor for each."""
    if sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel:
        sampler.forward = partial(_draw, sampler)


def _draw(
    sampler: TopKTopPSampler,
    logits: Tensor,
    generators: dict[int, torch.Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Draw as `forward_cpu`; (samples, vocabulary) to (samples,), and the log-probs where the engine's mode asks."""
    if sampler.logprobs_mode != "processed_logprobs":
        return sampler.forward_cpu(logits, generators, k, p)  # type: ignore[no-any-return]
    logits = apply_top_k_top_p(logits, k, p)
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    seeds = torch.randint(0, SEEDS, (len(logits),), dtype=torch.long)
    rows = seeds.unbind()
    for row, generator in generators.items():
        rows[row].random_(0, SEEDS, generator=generator)
    return torch.ops._C.fused_gumbel_argmax(logits.to(dtype=torch.float32), seeds), logprobs


def record_sampled_alone() -> None:
    """Have vLLM's engine in this process write down the log-prob of a sampled token without what it does for others."""
    LogprobsProcessor._update_sample_logprobs = _record


def _record(self: Any, logprobs: LogprobsLists) -> None:
    """Append a step's tokens to a request's log-probs, as vLLM does; of a request that asks for no others."""
    flat = self.logprobs
    if self.num_logprobs != 0 or self.tokenizer is not None or not isinstance(flat, FlatLogprobs):
        _update(self, logprobs)
        return
    tokens, values, ranks = logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks
    for step in range(len(ranks)):
        value, at = values.item(step, 0), len(flat.logprobs)
        self.cumulative_logprob += value
        flat.start_indices.append(at)
        flat.token_ids.append(tokens.item(step, 0))
        flat.logprobs.append(value)
        flat.ranks.append(ranks.item(step))
        flat.decoded_tokens.append(None)
        flat.end_indices.append(at + 1)


def allocate_by_blocks() -> None:
    """Have vLLM's scheduler in this process look for room in the KV cache only where a sample's last block is full."""
    KVCacheManager.allocate_slots = _allocate_where_full


def _allocate_where_full(
    self: Any, request: Request, num_new_tokens: int, *args: Any, **options: Any
) -> KVCacheBlocks | None:
    """Allocate as vLLM does; of a running request whose blocks have room for its next tokens nothing is to be done."""
    if not args and not any(options.values()) and num_new_tokens > 0 and _has_room(self, request, num_new_tokens):
        return self.empty_kv_cache_blocks
    return _allocate(self, request, num_new_tokens, *args, **options)


def _has_room(kept: Any, request: Request, tokens: int) -> bool:
    """Whether a running request's blocks hold so many more tokens, and none that is full by then has yet to be known
    by its tokens; False of a cache other than that of full attention, one block of it a hash."""
    manager, identity = kept.coordinator.single_type_managers[0], request.request_id
    size = manager.block_size
    is_plain = kept.num_kv_cache_groups == 1 and type(manager) is FullAttentionManager and not manager._partial_hit_reqs
    if not is_plain or size != kept.block_pool.hash_block_size or request.status != RequestStatus.RUNNING:
        return False
    whole, blocks = request.num_computed_tokens + tokens, manager.req_to_blocks.get(identity, ())
    if whole > size * len(blocks):
        return False
    return (
        not manager.enable_caching
        or manager.num_cached_block.get(identity, 0) >= min(whole, request.num_tokens) // size
    )
