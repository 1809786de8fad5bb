"""Routers that are to spread each sequence's tokens evenly: held to transformers' load balancing loss of one sequence,
however a step is packed, split and shared by ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlbench.data.base.routing import FAMILIES
from rlbench.rl import ppo
from rlbench.strategies import FSDPV2Strategy
from rlbench.strategies.options.config import OptionError
from rlbench.trainers.models.value_model import make_critic
from rlbench.trainers.passes.balancing import BALANCE
from rlbench.trainers.passes.forward import PolicyModel
from rlbench.trainers.texts.trainer import SPMDTextTrainer
from rlbench.trainers.update.experience_update import PolicyUpdate
from rlbench.trainers.update.value_update import ValueUpdate
from tests.modules import RAGGED, batch_of, qwen_on_meta
from tests.ranks import ranks
from tests.trainers.routed_models import mixture, save_mixture
from tests.trainers.update_reference import (
    EPS,
    assert_same,
    experience,
    fake,
    gradients,
    parts_of,
    policy_by_hand,
    token_weights,
)

COEF = 0.3
LOSS = ppo(clip_low=EPS[0], clip_high=EPS[1])


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_mixture(tmp_path_factory.mktemp("mixture"))


def balance_of(model: Any, ids: Any) -> Tensor:
    """transformers' own, of one sequence by itself."""
    found = model(torch.as_tensor(np.asarray(ids, np.int64))[None], output_router_logits=True)
    config = model.config
    chosen = getattr(config, "num_experts", None) or config.num_local_experts
    loss: Any = load_balancing_loss_func(found.router_logits, chosen, config.num_experts_per_tok)
    return loss  # type: ignore[no-any-return]


def sequences(batch: Any) -> list[np.ndarray]:
    return [np.concatenate(pair) for pair in zip(batch.prompts, batch.responses, strict=True)]


def by_hand(path: str, given: Any, mode: str, coef: float = COEF) -> dict[str, Tensor]:
    """Gradients of PPO's loss and of each sequence's imbalance, by the weight of its tokens."""
    model = AutoModelForCausalLM.from_pretrained(path)
    loss = policy_by_hand(model, given, mode)
    for ids, weights in zip(sequences(given.batch), token_weights(given, mode), strict=True):
        loss = loss + coef * float(weights.sum()) * balance_of(model, ids)
    loss.backward()
    return gradients(model)


def policy(path: str, mode: str, strategy: Any = None, recompute: bool = False, **own: Any) -> PolicyUpdate:
    strategy = strategy or fake()
    actor = strategy.prepare_model(AutoModelForCausalLM.from_pretrained(path), is_training=True)
    if recompute:
        actor.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    actor.train()
    optimizer = strategy.create_optimizer(actor, lr=1e-2, weight_decay=0.0)
    return PolicyUpdate(actor, optimizer, None, strategy, LOSS, mode, aux_loss_coef=COEF, **own)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_sequence_is_balanced_as_transformers_says_of_it_alone(family: str, packed: bool) -> None:
    model, rows = mixture(family), batch_of(RAGGED)
    policy = PolicyModel(model, torch.device("cpu"), half=False)
    with torch.no_grad(), policy.stats(rows, 1.0, packed, balance=True) as (_, inputs):
        found = inputs.balance.of_rows()
    with torch.no_grad():
        wanted = torch.stack([balance_of(model, ids) for ids in sequences(rows)])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert float(wanted.std()) > 0.01  # not a constant of the model


@pytest.mark.parametrize(
    "own",
    [
        {"mode": "token-mean", "size": 8},
        {"mode": "seq-mean-token-mean", "size": 3},
        {"mode": "seq-mean-token-mean", "size": 2, "packed": False},
        {"mode": "seq-mean-token-sum-norm", "size": 1, "recompute": True},
        {"mode": "token-mean", "size": 3, "head": "chunked", "recompute": True},
    ],
)
def test_a_steps_gradient_has_it_however_the_step_is_split(experts: str, own: dict[str, Any]) -> None:
    given, size = experience(), own.pop("size")
    wanted, without = by_hand(experts, given, own["mode"]), by_hand(experts, given, own["mode"], coef=0.0)
    update = policy(experts, **own)
    for part in parts_of(given, 4):  # calls that wait for one step
        update.accumulate(parts_of(part, size))
    found = gradients(update.model)
    assert_same(found, wanted, atol=1e-5)
    router = next(name for name in found if name.endswith("gate.weight"))
    assert float((wanted[router] - without[router]).abs().max()) > 1e-4
    own_balances = [float(balance_of(update.model, ids).detach()) for ids in sequences(given.batch)]
    assert update.finish()[BALANCE] == pytest.approx(np.mean(own_balances), rel=1e-4)


def test_ranks_share_it_as_one_process_has_it(experts: str, qwen: str) -> None:
    given = experience()

    def on_ranks() -> dict[str, Tensor]:
        strategy = FSDPV2Strategy(bf16=False)
        update = policy(experts, "token-mean", strategy)
        mine = given.rows([0, 1, 2, 3, 4] if strategy.rank == 0 else [5, 6, 7])
        update.accumulate(parts_of(mine, 2))
        return gradients(update.model)

    with ranks(2, qwen_on_meta(qwen)) as engine:
        for found in engine.run(on_ranks):
            assert_same(found, by_hand(experts, given, "token-mean"), atol=1e-5)


def test_a_critic_of_experts_and_the_pretraining_text_are_balanced_too(experts: str) -> None:
    given, strategy = experience(), fake()

    def critics(coef: float) -> dict[str, Tensor]:
        critic = strategy.prepare_model(make_critic(experts, seed=3), is_training=True)
        optimizer = strategy.create_optimizer(critic, lr=1e-2)
        update = ValueUpdate(critic, optimizer, None, strategy, None, "token-mean", aux_loss_coef=coef)
        update.accumulate(parts_of(given, 8))
        return gradients(critic)

    backbone = AutoModelForCausalLM.from_pretrained(experts)
    weights = token_weights(given, "token-mean")
    balances = [balance_of(backbone, ids) for ids in sequences(given.batch)]
    sum(COEF * float(w.sum()) * one for w, one in zip(weights, balances, strict=True)).backward()  # type: ignore[union-attr]
    plain, whole = critics(0.0), critics(COEF)
    for name, gradient in gradients(backbone).items():
        if name.endswith("gate.weight"):
            torch.testing.assert_close(whole[name] - plain[name], gradient, rtol=1e-4, atol=1e-5)

    def routers_of_text(own: dict[str, Any]) -> Tensor:
        update = policy(experts, "token-mean", strategy, ptx_coef=0.5)
        update.options = type(update.options)(**{**vars(update.options), **own})
        update.accumulate(parts_of(given, 8), [[[1, 2, 3, 4, 5], [6, 7]]])
        update._complete()
        return next(value for name, value in gradients(update.model).items() if name.endswith("gate.weight"))

    backbone.zero_grad()
    text = sum(w * balance_of(backbone, ids) for w, ids in ((4 / 5, [1, 2, 3, 4, 5]), (1 / 5, [6, 7])))
    (
        COEF * 0.5 * text
        + sum(
            COEF * float(w.sum()) * balance_of(backbone, ids)
            for w, ids in zip(weights, sequences(given.batch), strict=True)
        )
    ).backward()  # type: ignore[union-attr]
    wanted = next(value for name, value in gradients(backbone).items() if name.endswith("gate.weight"))
    found = routers_of_text({}) - routers_of_text({"aux_loss_coef": 0.0})
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_trainer_of_texts_balances(experts: str) -> None:
    texts = batch_of(RAGGED)

    def trained(coef: float) -> tuple[dict[str, Any], Tensor]:
        strategy: Any = fake(args={"train_batch_size": len(texts)})
        actor = strategy.prepare_model(AutoModelForCausalLM.from_pretrained(experts), is_training=True)
        optimizer = strategy.create_optimizer(actor, lr=1e-2, weight_decay=0.0)
        trainer = SPMDTextTrainer(strategy, actor, optimizer, "sft", texts, aux_loss_coef=coef)
        metrics = trainer.iterate()
        return metrics, next(p for name, p in actor.named_parameters() if name.endswith("gate.weight")).detach()

    (metrics, moved), (plain, before) = trained(COEF), trained(0.0)
    assert BALANCE in metrics and BALANCE not in plain
    assert float((moved - before).abs().max()) > 1e-3


def test_a_model_without_routers_is_refused(qwen: str) -> None:
    strategy = fake()
    actor = Qwen2ForCausalLM.from_pretrained(qwen)
    with pytest.raises(OptionError, match=r"aux_loss_coef=0.3 would have no effect: .*Qwen2ForCausalLM.* no router"):
        PolicyUpdate(actor, strategy.create_optimizer(actor, lr=1e-2), None, strategy, LOSS, aux_loss_coef=COEF)
