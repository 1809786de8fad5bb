"""What the tests of FSDP1 build: a user's module in both FSDPs, and its steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

import rlbench.nn
from tests.ranks import Ranks
from tests.strategies.surface import rows

STEPS = [[rows(4, 0), rows(4, 1)], [rows(4, 2), rows(4, 3)], [rows(4, 4), rows(4, 5)]]


class Loop:
    """What a user writes, whichever FSDP holds the module."""

    def on_weights_materialized(self: Any) -> None:
        self.optimizer = self.strategy.create_optimizer(self, lr=1e-2, weight_decay=0.1)
        self.forwards = 0
        self.register_forward_hook(lambda *_: setattr(self, "forwards", self.forwards + 1))

    def accumulate(self: Any, input_ids: list[list[int]], of: int) -> float:
        own = len(input_ids) // self.world_size
        ids = torch.tensor(input_ids[self.rank * own : (self.rank + 1) * own])
        logits = self(ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) / of
        loss.backward()
        return float(loss.detach())

    def looked_at(self: Any) -> None:
        with torch.no_grad():
            self(torch.tensor(rows(1, 7)))  # what it gathers must not be used again after the step

    def clipped(self: Any, max_norm: float) -> float:
        self.looked_at()
        norm = float(self.clip_grad_norm_(max_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def stepped(self: Any, max_norm: float) -> Any:
        self.looked_at()
        return self.strategy.step_now(self.optimizer, self, max_norm=max_norm)["grad_norm"]

    def fails(self: Any, where: str) -> None:
        def fail(*_: Any) -> None:
            raise ValueError("my own mistake")

        part = self.model.layers[1].mlp
        hook = part.register_forward_hook(fail) if where == "forward" else part.register_full_backward_hook(fail)
        try:
            self(torch.tensor(rows(2, 5))).logits.sum().backward()
        finally:
            hook.remove()

    def through_a_part(self: Any) -> None:
        self.model(torch.tensor(rows(2, 5)))

    def between(self: Any, input_ids: list[list[int]]) -> list[bool]:
        """What stands in the place of parameters between a forward and its backward."""
        loss = self(torch.tensor(input_ids)).logits.sum()
        found = [isinstance(parameter, nn.Parameter) for parameter in self.parameters()]
        loss.backward()
        self.zero_grad()
        self(torch.tensor(input_ids))  # whose result nobody uses
        return found


class FlatQwen(Loop, rlbench.nn.HuggingFaceFsdpTrainModule, Qwen2ForCausalLM):
    pass


class ShardedQwen(Loop, rlbench.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    pass


KINDS: dict[str, Any] = {"fsdp1": FlatQwen, "fsdp2": ShardedQwen}


def train(engine: Ranks, steps: list[Any] = STEPS, step: str = "stepped", max_norm: float = 0.5) -> list[float]:
    norms = []
    for micro_batches in steps:
        for data in micro_batches:
            engine.method("accumulate", data, len(micro_batches))
        norms.append(engine.method(step, max_norm)[0])
    return norms


def weights(engine: Ranks) -> dict[str, Tensor]:
    found: dict[str, Tensor] = engine.call("whole_state")[0]
    return {name: tensor for name, tensor in found.items() if name != "lm_head.weight"}
