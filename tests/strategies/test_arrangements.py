"""Ways to spread a policy over ranks, each with each way to hold it: gradients as of one rank, after a step too.

The table of docs/parallelism.md says the same.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from rlbench.trainers.models.policy_spec import Lora, PolicySpec
from tests.ranks import ranks
from tests.trainers.policy_reference import batch, forward_backward, gradients

pytestmark = [pytest.mark.slow, pytest.mark.curve]

ARRANGEMENTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shards": (2, {}),
    "copies": (2, {"shard_size": 1}),
    "shards and copies": (4, {"shard_size": 2}),
    "tensor parallel": (2, {"tensor_parallel": 2}),
    "sequence parallel": (2, {"sequence_parallel": 2}),
}
HELD: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "adapters, recomputed": ({"lora": Lora(rank=4), "gradient_checkpointing": True}, {}, 1e-5),
    "adapters on 8 bits": ({"lora": Lora(rank=4, base="int8")}, {}, 1e-5),
    "bfloat16 over float32": ({}, {"bf16": True}, 0.05),
    "bfloat16, float32 in the optimizer": ({"gradient_checkpointing": True}, {"use_mp_opt": True}, 0.05),
    "bfloat16 alone, layers kept": ({"dtype": "bfloat16"}, {"masters": False, "reshard_after_forward": False}, 0.05),
    "float16 over float32": ({}, {"fp16": True}, 0.05),
    "on the host": ({}, {"fsdp_cpu_offload": True}, 1e-5),
}
"""Of the module, of the ranks, and the part of its norm by which a gradient may differ."""
REFUSED = [("tensor parallel", "adapters on 8 bits")]


def second_gradients(path: str, how: str, count: int = 1, **arrangement: Any) -> dict[str, torch.Tensor]:
    spec, held, _ = HELD[how]
    with ranks(count, PolicySpec(path, lr=1e-3, **spec), **held, **arrangement) as engine:
        forward_backward(engine, batch(), token_budget=20)
        engine.call("policy_optim_step", {"max_norm": 1.0})
        forward_backward(engine, batch(1), token_budget=20)
        return gradients(engine)


alone = cache(second_gradients)


@pytest.mark.parametrize(("arrangement", "how"), [pair for pair in product(ARRANGEMENTS, HELD) if pair not in REFUSED])
def test_each_arrangement_goes_with_each_way_to_hold_a_policy(qwen: str, arrangement: str, how: str) -> None:
    count, options = ARRANGEMENTS[arrangement]
    expected, found = alone(qwen, how), second_gradients(qwen, how, count, **options)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= HELD[how][2] * float(value.norm()), name
