"""A session's steps and a trainer's are the same steps: from the same sequences in the same micro-batches come the same
weights, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlbench.data.prompts.prompt import Prompt
from rlbench.errors import LossError
from rlbench.rl import LossInputs, clip_cov, gspo, high_entropy, ppo
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.passes.micro_batches import plan_micro_batches
from rlbench.trainers.update.experience_update import PolicyUpdate
from tests.modules import RAGGED, batch_of
from tests.ranks import SameRanks
from tests.trainers.policy_reference import forward_backward

pytestmark = pytest.mark.slow

BUDGET = 30  # of the 87 tokens of a step: three micro-batches
PPO = ppo(clip_low=0.1, clip_high=0.15)
WITH_REFERENCE = replace(PPO, kl_coef=0.1, entropy_coef=0.02)


def given(seed: int, lengths: Any = RAGGED, spoilt: bool = False) -> Any:
    rng = np.random.default_rng(seed + 100)
    near = (-4.5 + 0.3 * rng.normal(size=(2, sum(response for _, response in lengths)))).astype(np.float32)
    batch = batch_of(lengths, seed, old_logprobs=near[0], ref_logprobs=near[1])
    if spoilt:
        advantages = batch.advantages.copy()
        advantages[np.flatnonzero(batch.mask)[0]] = 99.0
        batch = batch.replace(advantages=advantages)
    return batch.replace(group=(100 * seed + np.arange(len(lengths)) // 2).astype(np.int32))


def explodes(x: LossInputs) -> Any:
    """A finite loss whose gradient is not, where an advantage says so: the step is skipped."""
    spoilt = x.advantages > 50
    root = torch.where(spoilt, (x.logprobs - x.logprobs.detach()).abs(), 1.0).sqrt()  # of 0, where it is spoilt
    return torch.where(spoilt, root, PPO(x)[0]), {}


ONE_CALL = [[given(0)], [given(1)]]
SEVERAL = [[given(0, RAGGED[:3]), given(1, RAGGED[3:])], [given(2, RAGGED[2:5]), given(3, RAGGED[:1]), given(4)]]
SKIPPED = [[given(0)], [given(1, spoilt=True)], [given(2)]]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("steps", "loss", "options"),
    [
        (ONE_CALL, WITH_REFERENCE, {"aggregation": "seq-mean-token-mean"}),
        (ONE_CALL, PPO, {"aggregation": "token-mean", "packing": False, "head": "plain"}),
        (ONE_CALL, replace(PPO, tokens=high_entropy(fraction=0.4)), {"aggregation": "token-mean"}),
        (ONE_CALL, clip_cov(), {"aggregation": "seq-mean-token-sum-norm", "packing": False}),
        (SEVERAL, WITH_REFERENCE, {"aggregation": "token-mean"}),
        (SEVERAL, gspo(), {"aggregation": "seq-mean-token-mean", "packing": False}),
        (SEVERAL, PPO, {"aggregation": "prompt-mean"}),
        (SKIPPED, explodes, {"aggregation": "token-mean"}),
    ],
)
def test_steps_of_a_session_and_of_a_trainer_give_equal_weights(
    trained: SameRanks, world_size: int, steps: list[list[Any]], loss: Any, options: dict[str, Any]
) -> None:
    with trained(world_size) as engine:
        stepped = []
        for calls in steps:
            for batch in calls:
                forward_backward(engine, batch, loss, token_budget=BUDGET, **options)
            stepped.append(engine.call("policy_optim_step", {})[0]["stepped"])
        of_session = engine.call("state_checksum")
    with trained(world_size) as engine:
        ended = engine.run(lambda: as_a_trainer(module, strategy, steps, loss, **options))[0]  # type: ignore[name-defined]
        assert engine.call("state_checksum") == of_session
    assert [metrics["actor_skipped"] == 0 for metrics in ended] == stepped
    assert stepped == ([True, False, True] if steps is SKIPPED else [True] * len(steps))


def test_a_prompt_that_is_split_over_two_calls_is_refused_where_it_is_prompts_that_count(trained: SameRanks) -> None:
    """In one call its sequences share a prompt's weight; what is summed already cannot be weighed anew."""
    first, other = given(0), given(1).replace(group=given(0).group)
    with trained(1) as engine:
        forward_backward(engine, first.rows([0, 2]), PPO, aggregation="prompt-mean")
        with pytest.raises(LossError, match="one call"):
            forward_backward(engine, first.rows([0]), PPO, aggregation="prompt-mean")
        forward_backward(engine, other, PPO, aggregation="prompt-mean")  # its numbers, and prompts of its own
        assert engine.call("policy_optim_step", {})[0]["stepped"]


def as_a_trainer(
    module: Any,
    strategy: Any,
    steps: list[list[Any]],
    loss: Any,
    aggregation: str,
    packing: bool = True,
    head: str = "auto",
) -> list[dict[str, float]]:
    """The same on a rank, from experience in the micro-batches that the session makes."""
    update = PolicyUpdate(module, module.optimizer, None, strategy, loss, aggregation, packed=packing, head=head)
    ended = []
    for calls in steps:
        for batch in calls:
            plan = plan_micro_batches(batch.lengths, strategy.world_size, BUDGET)[strategy.rank]
            update.accumulate([experience(batch.rows(rows)) for rows in plan if len(rows)])
        ended.append(update.finish())
    return ended


def experience(batch: Any) -> Experience:
    asked = tuple(Prompt("?") for _ in range(len(batch)))
    return Experience(batch, asked, ("",) * len(batch), np.zeros(batch.tokens, np.float32))
