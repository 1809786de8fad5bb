"""The experts that tokens took, put into vLLM's outputs where vLLM does not deliver them: on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class RecordedRequests:
    """Requests of one call in an engine whose workers record experts (`record_routing`)."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._held: dict[str, tuple[str, int]] = {}  # by a request's name: its name in the engine, and its tokens

    def queued(self, name: str, inside: str, prompt: int) -> None:
        """A request was queued, which the engine calls `inside`; `prompt`: tokens of its prompt."""
        self._held[name] = inside, prompt

    def complete(self, outputs: Sequence[Any]) -> None:
        """Give outputs of the last step that are their request's last one the experts of all its tokens but the one
        drawn last, `routed_experts` (tokens, layers, top_k) int16; None where they are not known."""
        ended: list[tuple[Any, tuple[str, int]]] = []
        for output in outputs:
            if output.request_id not in self._held:
                continue
            (part,) = output.outputs
            inside, tokens = self._held[output.request_id]
            self._held[output.request_id] = inside, tokens + len(part.token_ids)
            if output.finished:
                inside, tokens = self._held.pop(output.request_id)
                ended.append((part, (inside, tokens - 1)))
        if not ended:
            return
        found = self._engine.collective_rpc("routing_of", args=([request for _, request in ended],))[0]
        for (part, _), experts in zip(ended, found, strict=True):
            part.routed_experts = experts
