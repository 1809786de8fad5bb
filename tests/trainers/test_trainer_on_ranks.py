"""What a trainer leaves on two ranks: nothing once it is gone, and nobody waiting for a rank that failed alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from rlbench.errors import EngineError
from tests.modules import qwen_on_meta
from tests.ranks import RankFailure, Ranks, ranks
from tests.trainers.making import LONGEST, TableEngine, asked, last_token, qwen_of
from tests.trainers.small_trainer import OPTIONS


@pytest.fixture(scope="module")
def engine(qwen: str) -> Iterator[Ranks]:
    with ranks(2, qwen_on_meta(qwen)) as made:
        yield made


def trainer_on(path: str, **given: Any) -> Any:
    import rlbench.strategies
    from rlbench.trainers import SPMDPPOTrainer

    kind = getattr(rlbench.strategies, given.pop("strategy", "FSDPV2Strategy"))
    s: Any = kind(bf16=False, args={**OPTIONS, **given.pop("options", {})})
    s.gather_and_generate = TableEngine()
    s.update_engine_weights = lambda actor: {"version": 1}
    actor = s.prepare_model(qwen_of(path), is_training=True)
    return SPMDPPOTrainer(
        s,
        actor,
        None,
        given.pop("reward", last_token),
        None,
        None,
        s.create_optimizer(actor, lr=1e-3),
        prompts=asked(40),
        rollout_batch_size=4,
        max_tokens=LONGEST,
        prompt_max_len=16,
        kl_coef=0.0,
        **given,
    )


def outcomes(engine: Ranks, fn: Any) -> list[Any]:
    return engine.outcomes("run", [(cloudpickle.dumps(fn), (), {})] * 2)


def test_a_trainer_that_is_gone_leaves_no_group_behind(engine: Ranks, qwen: str) -> None:
    def grown() -> int:
        import gc

        from torch.distributed import distributed_c10d

        def count() -> int:
            gc.collect()
            return len(distributed_c10d._world.pg_map)

        trainer_on(qwen).make_experience()
        before = count()
        for _ in range(3):
            trainer_on(qwen).make_experience()
        return count() - before

    assert engine.run(grown) == [0, 0]


@pytest.mark.parametrize("where", ["board", "lengths"])
def test_a_log_that_rank_0_cannot_write_ends_the_call_on_both(
    engine: Ranks, qwen: str, tmp_path: Any, where: str
) -> None:
    """Defect absent: rank 0 raised alone, and the other waited for it in the next collective."""
    (tmp_path / "file").write_text("no folder")
    folder = str(tmp_path / "file" / "in")
    given = {"use_tensorboard": folder} if where == "board" else {"log_dir": folder, "plot_every": 0}

    def make() -> None:
        trainer = trainer_on(qwen, **given)
        trainer.make_experience()
        trainer.ppo_train()

    here, there = outcomes(engine, make)
    assert isinstance(here, RankFailure) and isinstance(here.error, OSError)
    assert isinstance(there, RankFailure) and isinstance(there.error, EngineError), there
    assert "failed on rank 0" in str(there.error)


def test_a_number_that_one_experience_lacks_is_unknown_there(engine: Ranks, qwen: str) -> None:
    """A maker of the user's that adds a number to the first experience alone, on one rank."""

    def make() -> None:
        import torch.distributed as dist

        trainer = trainer_on(qwen)
        trainer.make_experience()
        if dist.get_rank() == 1:
            for part in trainer.replay_buffer.items:
                part.info["now"] = part.info["reward"]
        trainer.make_experience()
        trainer.ppo_train()

    assert outcomes(engine, make) == [None, None]


def test_a_metric_that_a_reward_names_in_one_call_alone_is_unknown_in_the_others(engine: Ranks, qwen: str) -> None:
    def make() -> Any:
        calls: list[int] = []

        def reward_fn(scores: Any, *_: Any) -> Any:
            import torch.distributed as dist

            calls.append(1)
            return scores[0], {"now": 1.0} if len(calls) == 1 and dist.get_rank() == 1 else {}

        trainer = trainer_on(qwen, reward_fn=reward_fn)
        trainer.make_experience()
        trainer.make_experience()
        return "policy_loss" in trainer.ppo_train()

    assert engine.run(make) == [True, True]
