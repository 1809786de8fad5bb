"""What is left on the ranks when layers stay gathered after their forward, and when a probe fails: two real ranks."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest
import torch

from rlbench.errors import EngineError
from rlbench.strategies import FSDPV2Strategy
from rlbench.strategies.whole_pass import unvotable, votable
from rlbench.trainers.forward import PolicyModel
from rlbench.trainers.value_model import make_critic, valued
from tests.modules import qwen_on_meta
from tests.ranks import RankFailure, ranks
from tests.trainers.policy_reference import GRPO, batch, forward_backward, run_steps
from tests.trainers.test_whole_pass import OPTIONS, run_out
from tests.trainers.update_reference import actor_of, experience

pytestmark = pytest.mark.slow

KEPT = {"reshard_after_forward": False}


@pytest.fixture(scope="module")
def undisturbed(qwen: str) -> str:
    """Checksum after three steps of ranks that nothing ever happened to."""
    with ranks(2, qwen_on_meta(qwen), **KEPT) as engine:
        return run_steps(engine, 3)


def test_a_step_that_failed_leaves_no_gradient_on_shards_of_gathered_layers(qwen: str, undisturbed: str) -> None:
    with ranks(2, qwen_on_meta(qwen), **KEPT) as engine:
        run_steps(engine, 1)
        engine.run(lambda: run_out(module, "behind the last layer", 2))  # type: ignore[name-defined]
        args = [(batch(7), cloudpickle.dumps(GRPO), OPTIONS)] * 2
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


def test_what_fails_in_a_probe_is_not_voted_on_as_the_peers_are_in_its_collectives(qwen: str) -> None:
    given = experience().batch

    def tried() -> Any:
        import torch.distributed as dist

        strategy = FSDPV2Strategy(bf16=False)
        critic = strategy.prepare_model(make_critic(qwen, seed=3), is_training=True)
        actor, _ = actor_of(qwen, strategy)
        policy = PolicyModel(actor, strategy.device.device, half=False)

        def outcome(run: Any) -> str:
            try:
                run()
            except Exception as error:
                try:
                    return f"votable: {votable(error)}"
                except type(error):
                    return f"raised: {error}"
            return "it went through"

        def value() -> None:
            with valued(critic, given, strategy.device.device, packed=True):
                pass

        def stats() -> None:
            with policy.stats(given, 1.0, packed=False):
                pass

        def refused() -> None:
            with unvotable(actor):
                raise EngineError("found alike on all ranks")

        found = []
        for model, where, run in ((critic, "inside a layer", value), (actor, "inside a layer", stats)):
            # on all ranks, so that none is left waiting; of the actor the second pass, by the output layer itself
            run_out(model, where, 1 if model is critic else 2, on_rank=dist.get_rank())
            found.append(outcome(run))
            found.append(outcome(run))
        return [*found, outcome(refused)]

    with ranks(2, qwen_on_meta(qwen)) as engine:
        ran_out, fine = "raised: not enough memory", "it went through"
        expected = [ran_out, fine, ran_out, fine, "votable: found alike on all ranks"]
        assert engine.run(tried) == [expected, expected]
    assert issubclass(torch.OutOfMemoryError, RuntimeError)  # which is what a head that does not fit raises, too
