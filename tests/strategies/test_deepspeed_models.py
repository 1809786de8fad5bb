"""What DeepSpeed holds beside a plain policy: adapters, layers that are computed again, a frozen reward model, pairs.

Each is held to what FSDP2 gives on the same two ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlbench.rl import bradley_terry, dpo
from rlbench.trainers import SPMDTextTrainer
from rlbench.trainers.models.lora import Lora
from rlbench.trainers.models.policy_module import make_policy
from rlbench.trainers.models.policy_spec import PolicySpec
from rlbench.trainers.models.reward_heads import make_reward_model, scores_of
from tests.ranks import Ranks
from tests.strategies.surface import assert_close, rows, run_steps, whole
from tests.trainers.making import asked
from tests.trainers.test_experience_ranks import joined, maker_of, mine
from tests.trainers.test_text_trainer import pairs, texts

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make env")
pytestmark = pytest.mark.slow

STEPS = [[rows(4, 0), rows(4, 1)], [rows(4, 2), rows(4, 3)]]
STAGES = [1, 2, 3]


def strategy_of(stage: int, **own: Any) -> Any:
    """FSDP2's where there is no stage."""
    from rlbench.strategies import DeepspeedStrategy, FSDPV2Strategy

    given = {"bf16": False, "train_batch_size": 8, "micro_train_batch_size": 2, "max_norm": 0.5, **own}
    return DeepspeedStrategy(**given, args={"zero_stage": stage}) if stage else FSDPV2Strategy(**given)


def parameters(strategy: Any, model: Any) -> dict[str, torch.Tensor]:
    """As a checkpoint has them; of DeepSpeed on rank 0."""
    return whole({n: t for n, t in strategy.state_of(model).tensors().items() if n.startswith("parameter/")})


@pytest.mark.parametrize(("stages", "base"), [([1, 3], None), ([2], "nf4"), ([3], "int8")])
def test_adapters_train_over_layers_that_are_computed_again(
    engine: Ranks, qwen: str, stages: list[int], base: str | None
) -> None:
    def train(stage: int, recompute: bool) -> Any:
        strategy, runs = strategy_of(stage), []
        spec = PolicySpec(qwen, lora=Lora(rank=4, base=base), gradient_checkpointing=recompute)
        model = strategy.prepare_model(make_policy(spec), is_training=True)
        model.train()
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(True))
        optimizer = strategy.create_optimizer(model, lr=1e-2, weight_decay=0.0)
        results = run_steps(strategy, model, optimizer, STEPS)
        return results, parameters(strategy, model), len(runs)

    expected, moved, _ = engine.run(train, 0, False)[0]
    for stage in stages:
        kept, recomputed = (engine.run(train, stage, recompute)[0] for recompute in (False, True))
        assert recomputed[2] == 2 * kept[2], stage
        for results, found, _ in (kept, recomputed):
            norms = [one["grad_norm"] for one in results if one["stepped"]]
            assert norms == pytest.approx([one["grad_norm"] for one in expected if one["stepped"]], abs=1e-5), stage
            assert_close(found, moved, atol=1e-5)
    assert all("lora_" in name for name in moved)  # the base is its source's
    assert any("lora_B" in name and float(value.abs().max()) > 1e-3 for name, value in moved.items())


def test_adapters_go_over_to_fsdp2_and_back(engine: Ranks, qwen: str, tmp_path: Path) -> None:
    def run(stage: int, source: str, target: str, steps: Any) -> dict[str, torch.Tensor]:
        strategy = strategy_of(stage)
        model = strategy.prepare_model(make_policy(PolicySpec(qwen, lora=Lora(rank=4))), is_training=True)
        optimizer = strategy.create_optimizer(model, lr=1e-2, weight_decay=0.0)
        if source:
            strategy.load_ckpt(model, source, optimizer)
        run_steps(strategy, model, optimizer, steps)
        strategy.save_ckpt(model, target, "x", optimizer=optimizer)
        return parameters(strategy, model)

    first, second, third, plain = (str(tmp_path / name) for name in "abcd")
    steps = [*STEPS, [rows(4, 4), rows(4, 5)]]
    expected = engine.run(run, 0, "", plain, steps)[0]
    engine.run(run, 2, "", first, steps[:1])
    engine.run(run, 0, first, second, steps[1:2])
    assert_close(engine.run(run, 3, second, third, steps[2:])[0], expected, atol=5e-5)


def test_a_frozen_reward_model_scores_as_with_fsdp2(engine: Ranks, qwen: str) -> None:
    def score(stage: int) -> Any:
        strategy = strategy_of(stage)
        reward = strategy.prepare_model(make_reward_model(qwen, seed=1))
        actor = strategy.prepare_model(make_policy(PolicySpec(qwen, trainable=False)))
        made = joined(maker_of(strategy, actor, reward).make_experience_list(mine(asked(4), strategy.rank)))
        strategy.reload_model(reward)
        ids = [[*p.tolist(), *r.tolist()] for p, r in zip(made.batch.prompts, made.batch.responses, strict=True)]
        return made.batch.rewards, scores_of(reward, ids, strategy, 1).numpy()

    by_fsdp2 = engine.run(score, 0)
    for stage in STAGES:
        for (expected, _), (found, again) in zip(by_fsdp2, engine.run(score, stage), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=f"stage {stage}")
            np.testing.assert_allclose(again, expected, atol=1e-5, err_msg=f"stage {stage}")
            assert float(np.std(expected)) > 1e-3


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_a_trainer_of_texts_takes_the_steps_it_takes_with_fsdp2(engine: Ranks, qwen: str, kind: str) -> None:
    def train(stage: int) -> Any:
        strategy = strategy_of(stage, train_batch_size=4, micro_train_batch_size=2)
        policy = kind != "reward"
        made = make_policy(PolicySpec(qwen)) if policy else make_reward_model(qwen, seed=1).requires_grad_(True)
        actor = strategy.prepare_model(made, is_training=True)
        reference = None
        if kind == "dpo":
            reference = strategy.prepare_model(make_policy(PolicySpec(qwen, trainable=False)))
        optimizer = strategy.create_optimizer(actor, lr=1e-2, weight_decay=0.0)
        loss: Any = {"sft": "sft", "dpo": dpo(beta=0.5), "reward": bradley_terry()}[kind]
        data = texts() if kind == "sft" else pairs(6)
        trainer = SPMDTextTrainer(strategy, actor, optimizer, loss, data, reference=reference, eval_texts=data)
        steps = [{name: one[name] for name in ("loss", "grad_norm")} for one in (trainer.iterate(), trainer.iterate())]
        return steps, trainer.evaluate()["eval/loss"], parameters(strategy, actor)

    steps, held_out, moved = engine.run(train, 0)[0]
    assert steps[0] != steps[1]
    for stage in STAGES:
        found, told, own = engine.run(train, stage)[0]
        assert [pytest.approx(one, abs=1e-5) for one in steps] == found, stage
        assert told == pytest.approx(held_out, abs=1e-5), stage
        assert_close(own, moved, atol=1e-4)  # two steps of AdamW at a rate of 0.01
