"""The experts that a replica's routers chose, where vLLM does not deliver them itself: on a CPU, whose runner of models
lacks that. vLLM's own hook in the routers gives them; they are kept by place in the KV cache, so a block that several
requests share keeps those of its tokens too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context

from rlbench.errors import BuildError


class RoutingRecord:
    """`experts` (places in the KV cache, layers, top_k) int16, beside the cache of the runner's model; dense layers
    have zeros."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        model, cache = runner.vllm_config.model_config, runner.kv_cache_config
        if len(cache.kv_cache_groups) != 1:
            raise BuildError(
                f"return_routed_experts: {', '.join(model.architectures)} has {len(cache.kv_cache_groups)} kinds of KV "
                "cache, and experts are recorded beside one: leave it out"
            )
        self._block = cache.kv_cache_groups[0].kv_cache_spec.block_size
        layers, chosen = model.get_total_num_hidden_layers(), model.get_num_experts_per_tok()
        self.experts = torch.zeros(cache.num_blocks * self._block, layers, chosen, dtype=torch.int16)
        bind_routed_experts_capturer(runner.model, self)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Keep what the router of a layer chose for the tokens (n, top_k) of the pass under way; called by vLLM."""
        places = next(iter(get_forward_context().slot_mapping.values()), None)  # type: ignore[union-attr]
        if places is None:
            return  # a pass that fills no cache
        held = places >= 0  # others pad
        self.experts[places[held], layer_id] = topk_ids[: len(places)][held].to(torch.int16)

    def of(self, runner: Any, requests: Sequence[tuple[str, int]]) -> list[np.ndarray | None]:
        """Return the experts of the first so many tokens of each request, int16 (tokens, layers, top_k); None where
        their places may be others' by now. Requests that ended in the last step are there until the next one."""
        return [self._of(runner, name, tokens) for name, tokens in requests]

    def _of(self, runner: Any, name: str, tokens: int) -> np.ndarray | None:
        if name not in runner.input_batch.req_id_to_index:
            return None
        (blocks,) = runner.requests[name].block_ids
        at = np.arange(tokens)
        places = np.asarray(blocks, np.int64)[at // self._block] * self._block + at % self._block
        found: np.ndarray = self.experts[torch.from_numpy(places)].numpy()
        return found
