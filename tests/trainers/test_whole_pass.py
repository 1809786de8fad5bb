"""A pass that fails on one rank alone: its peers get out of it, all ranks say so, and training goes on as if nothing
had been. Memory that runs out is made to by a hook; all else is real: two ranks, gloo, FSDP2."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest
import torch

from rlbench.errors import EngineError
from rlbench.strategies import FSDPV2Strategy
from rlbench.trainers.model_stage import ModelStage
from rlbench.trainers.update import PolicyUpdate, ValueUpdate
from rlbench.trainers.value_model import make_critic
from tests.modules import qwen_on_meta
from tests.ranks import RankFailure, Ranks, ranks
from tests.trainers.policy_reference import GRPO, batch, forward_backward, run_steps
from tests.trainers.update_reference import actor_of, experience, parts_of, weights_of

pytestmark = pytest.mark.slow

WHERE = ["before the first gather", "inside a layer", "behind the last layer", "backward", "after the last backward"]
OPTIONS = {"token_budget": 20}


@pytest.fixture(scope="module")
def engine(qwen: str) -> Any:
    with ranks(2, qwen_on_meta(qwen)) as made:
        yield made


def run_out(model: Any, where: str, at: int, on_rank: int = 1) -> None:
    """Have the memory of one rank run out, once, in the `at`-th pass through a place of the model."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from rlbench.trainers import forward

    seen = 0
    layer = next(part for name, part in model.named_modules() if name.endswith("layers.0"))

    handle: Any

    def out(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            handle.remove()
            raise torch.OutOfMemoryError("not enough memory")

    if dist.get_rank() != on_rank:
        return
    if where == "before the first gather":
        given = forward.model_inputs
        handle = SimpleNamespace(remove=lambda: setattr(forward, "model_inputs", given))
        forward.model_inputs = lambda *args: out() or given(*args)
    elif where == "inside a layer":
        handle = layer.mlp.register_forward_pre_hook(out)
    elif where == "behind the last layer":
        handle = model.register_forward_hook(out)
    else:
        handle = layer.mlp.register_full_backward_hook(out)


@pytest.fixture(scope="module")
def undisturbed(qwen: str) -> str:
    """Checksum after three steps of ranks that nothing ever happened to."""
    with ranks(2, qwen_on_meta(qwen)) as engine:
        return run_steps(engine, 3)


@pytest.mark.parametrize("where", WHERE)
def test_a_pass_that_fails_on_one_rank_ends_the_step_on_both_and_training_goes_on(
    qwen: str, undisturbed: str, where: str
) -> None:
    with ranks(2, qwen_on_meta(qwen)) as engine:
        run_steps(engine, 1)  # passes have been seen whole
        micro_batches = forward_backward(engine, batch(7), **OPTIONS)[1]["micro_batches"]
        engine.call("policy_zero_grad")
        assert micro_batches > 2
        at = micro_batches if where == "after the last backward" else 2
        engine.run(lambda: run_out(module, where, at))  # type: ignore[name-defined]
        args = [(batch(7), cloudpickle.dumps(GRPO), OPTIONS)] * 2
        first, second = engine.outcomes("policy_forward_backward", args)
        assert isinstance(second, RankFailure) and isinstance(second.error, torch.OutOfMemoryError)
        assert isinstance(first, RankFailure) and "failed on rank 1 (OutOfMemoryError" in str(first.error)
        assert first.error.__dict__["secondary"]
        with pytest.raises(EngineError, match="no gradient"):
            engine.call("policy_optim_step", {})
        for seed in (1, 2):
            forward_backward(engine, batch(seed), token_budget=20)
            engine.call("policy_optim_step", {})
        assert engine.call("state_checksum") == [undisturbed] * 2


@pytest.mark.parametrize("where", ["inside a layer", "backward", "after the last backward"])
@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_an_update_of_a_trainer_ends_on_both_ranks_and_the_next_step_is_what_it_would_have_been(
    qwen: str, engine: Ranks, kind: str, where: str
) -> None:
    given = experience()

    def steps(fails: bool) -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        shares = [[0, 1, 2, 3, 4], [5, 6, 7]]
        mine = parts_of(given.rows(shares[strategy.rank]), 1)
        update: Any
        if kind == "actor":
            update = PolicyUpdate(*actor_of(qwen, strategy), None, strategy, GRPO)
        else:
            critic = strategy.prepare_model(make_critic(qwen, seed=3), is_training=True)
            update = ValueUpdate(critic, strategy.create_optimizer(critic, lr=1e-2), None, strategy)
        said = None
        update.step(mine)
        if fails:
            run_out(update.model, where, len(mine) if where == "after the last backward" else 2)
            try:
                update.step(mine)
            except (EngineError, torch.OutOfMemoryError) as error:
                said = type(error).__name__, str(error), update.waiting
        update.step(mine)
        return said, weights_of(update.model)

    undisturbed = [weights for _, weights in engine.run(steps, False)]
    (peer, first), (own, second) = engine.run(steps, True)
    assert peer[0] == "EngineError" and "failed on rank 1 (OutOfMemoryError" in peer[1] and not peer[2]
    assert own == ("OutOfMemoryError", "not enough memory", False)
    for found, expected in zip((first, second), undisturbed, strict=True):
        assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


def test_a_scoring_pass_that_fails_on_one_rank_fails_on_both_and_the_next_scores(qwen: str, engine: Ranks) -> None:
    given = experience().batch

    def scored() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        actor, _ = actor_of(qwen, strategy)
        stage = ModelStage(strategy, 2, packed=True, chunk_rows=None)
        before = stage.policy_stats(actor, given, "log-probs").logprobs
        run_out(actor, "inside a layer", 2)
        try:
            stage.policy_stats(actor, given, "log-probs")
            said = "it went through"
        except (EngineError, torch.OutOfMemoryError) as error:
            said = f"{type(error).__name__}: {error}"
        return said, before, stage.policy_stats(actor, given, "log-probs").logprobs

    (peer, before, after), (own, _, _) = engine.run(scored)
    assert "log-probs failed on rank 1 (OutOfMemoryError" in peer and own == "OutOfMemoryError: not enough memory"
    assert (before == after).all()


def test_where_the_collectives_of_a_pass_are_not_known_the_failure_is_not_voted_on(qwen: str, engine: Ranks) -> None:
    """The peers may wait for anything then; whoever drives the ranks ends the one that failed."""

    def tried() -> Any:
        from rlbench.strategies.whole_pass import FORWARD, votable, whole_pass

        strategy = FSDPV2Strategy(bf16=False)
        actor, _ = actor_of(qwen, strategy)

        def failing(kind: str) -> str:
            try:
                with whole_pass(actor, kind):
                    raise ValueError("before anything was gathered")
            except ValueError as error:
                try:
                    return f"votable: {votable(error)}"
                except ValueError:
                    return "raised"

        with torch.no_grad():
            never_seen = failing(FORWARD)
            for _ in range(2):
                with whole_pass(actor, FORWARD):
                    actor(torch.tensor([[1, 2, 3]]))
            known = failing(FORWARD)
            with whole_pass(actor, FORWARD):
                actor(torch.tensor([[1, 2, 3]]))
                torch.distributed.barrier()  # a collective of the user's own
            unlike = failing(FORWARD)
        return never_seen, known, unlike

    expected = ("raised", "votable: before anything was gathered", "raised")
    assert engine.run(tried) == [expected, expected]
