"""A replica at its fullest: as many longest requests at once as it says it holds, measured while it holds them. Each is
random tokens, which share nothing, and runs until all are in the KV cache with a token drawn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.dispatch.context import current

if TYPE_CHECKING:
    from rlbench.workers.replica.vllm_requests import EngineRequests


@dataclass(frozen=True)
class Filled:
    """What was reached: requests `claimed` by the cache's own count, `asked`, `held` at once and `preempted`; `usage`:
    share of the cache; bytes as `PeakMemory` measures."""

    claimed: int
    asked: int
    held: int
    usage: float
    preempted: int
    length: int
    peak: int
    before: int
    limit: int
    how: str
    ended: str


def fill(
    requests: EngineRequests, length: int, seconds: float, max_num_seqs: int, pids: Sequence[int], on_gpu: bool
) -> Filled:
    """Fill the cache of an in-process vLLM engine with requests of `length` tokens, for `seconds` at most."""
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    from rlbench.strategies.memory.peak import PeakMemory, room

    alone = on_gpu and len(pids) == 1  # else vLLM's worker processes hold the GPUs, and took their memory at the start
    device = torch.device("cuda", torch.cuda.current_device()) if alone else None
    engine: Any = requests.engine
    scheduler = engine.engine_core.engine_core.scheduler
    config = engine.vllm_config
    longest = get_max_concurrency_for_kv_cache_config(config, scheduler.kv_cache_config)
    claimed = int(longest * config.model_config.max_model_len / length)
    count = max(1, min(claimed, max_num_seqs))
    steps = -(-count * length // config.scheduler_config.max_num_batched_tokens)
    # the first must still be there when the last has been read, in steps that also draw tokens for those before it
    answer = max(1, min(length // 2, 2 * steps + 2))
    params = SamplingParams(
        max_tokens=answer, ignore_eos=True, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    random = np.random.default_rng(0)
    vocabulary = config.model_config.get_vocab_size()
    context, started = current(), set[int]()
    held, usage, preempted = 0, 0.0, 0
    deadline = time.monotonic() + seconds
    with PeakMemory(device, pids) as memory:
        for number in range(count):
            requests.add(number, random.integers(0, vocabulary, max(1, length - answer)).tolist(), params)
        ended = "all drew a token"
        while requests.running and len(started) < count:
            if context.stop_requested() or time.monotonic() > deadline:
                ended = "stopped" if context.stop_requested() else f"{seconds:g} s were over"
                break
            started |= {number for number, output in requests.step() if output.outputs[0].token_ids}
            held = max(held, len(scheduler.running))
            usage = max(usage, float(scheduler.kv_cache_manager.usage))
            preempted = max(preempted, sum(r.num_preemptions for r in scheduler.requests.values()))
            context.report(finished=len(started), total=count, running=held)
    limit = memory.before + room(device)
    how = memory.how if alone or not on_gpu else f"{memory.how}, host memory alone"
    return Filled(claimed, count, held, usage, preempted, length, memory.peak, memory.before, limit, how, ended)
