"""What is left on the ranks when layers stay gathered after their forward: two real ranks."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest
import torch

from rlbench.errors import EngineError
from tests.modules import qwen_on_meta
from tests.ranks import RankFailure, ranks
from tests.trainers.policy_reference import GRPO, batch, forward_backward, run_steps

pytestmark = pytest.mark.slow

KEPT = {"reshard_after_forward": False}


def run_out(model: Any) -> None:
    """Have the memory run out behind the last layer of the second pass from now on, on every rank alike."""
    seen = 0

    def out(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            handle.remove()
            raise torch.OutOfMemoryError("not enough memory")

    handle = model.register_forward_hook(out)


@pytest.fixture(scope="module")
def undisturbed(qwen: str) -> str:
    """Checksum after three steps of ranks that nothing ever happened to."""
    with ranks(2, qwen_on_meta(qwen), **KEPT) as engine:
        return run_steps(engine, 3)


def test_a_step_that_failed_leaves_no_gradient_on_shards_of_gathered_layers(qwen: str, undisturbed: str) -> None:
    with ranks(2, qwen_on_meta(qwen), **KEPT) as engine:
        run_steps(engine, 1)
        engine.run(lambda: run_out(module))  # type: ignore[name-defined]
        args = [(batch(7), cloudpickle.dumps(GRPO), {"token_budget": 20})] * 2
        assert all(isinstance(found, RankFailure) for found in engine.outcomes("policy_forward_backward", args))
        with pytest.raises(EngineError, match="no gradient"):
            engine.call("policy_optim_step", {})
        for seed in (1, 2):
            forward_backward(engine, batch(seed), token_budget=20)
            engine.call("policy_optim_step", {})
        assert engine.call("state_checksum") == [undisturbed] * 2


def test_log_probs_after_a_step_are_those_of_its_weights(qwen: str) -> None:
    found = []
    for config in (KEPT, {}):
        with ranks(2, qwen_on_meta(qwen), **config) as engine:
            run_steps(engine, 1)
            forward_backward(engine, batch(1))
            engine.call("policy_forward", batch(2), {})
            engine.call("policy_optim_step", {})
            first = engine.call("policy_forward", batch(2), {})[0]["channels"]["logprobs"]
            found.append(first)
    assert all((kept == freed).all() for kept, freed in zip(*found, strict=True))
