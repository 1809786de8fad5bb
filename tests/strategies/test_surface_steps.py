"""Backward, accumulation, clipping and steps of the strategy surface on two ranks, against torch alone in one process.

Each defect of the reference system that this part had is named where a test shows it absent.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2ForCausalLM

from rlbench.errors import EngineError
from rlbench.strategies import FSDPV2Strategy
from rlbench.strategies.steps import decays, parameter_groups
from tests.ranks import Ranks
from tests.strategies.surface import (
    assert_close,
    language_loss,
    rows,
    run_steps,
    said_by,
    share,
    train_by_hand,
    train_on_ranks,
    whole,
)


@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_ranks_train_as_torch_alone_does_clipped_over_all_groups_at_once_or_not(
    qwen: str, engine: Ranks, max_norm: float
) -> None:
    """Parameters, optimizer state and norms. Defects absent: the gradient was a sum over micro-batches, not their mean;
    clipping was group by group, not by the global norm; max_norm=0 zeroed all gradients."""
    steps = [[rows(4, 2 * step), rows(4, 2 * step + 1)] for step in range(3)]
    expected = train_by_hand(qwen, steps, max_norm)
    found = engine.run(
        lambda *a: train_on_ranks(*a, {}, max_norm=max_norm, micro_train_batch_size=2, train_batch_size=8), qwen, steps
    )[0]
    assert_close(found["parameters"], expected["parameters"])
    assert_close(found["state"], expected["state"])
    stepped = [result for result in found["results"] if result["stepped"]]
    assert [result["grad_norm"] for result in stepped] == pytest.approx(expected["norms"], rel=1e-4)
    assert len(found["results"]) == 2 * len(stepped)
    assert sorted(found["groups"]) == sorted(expected["groups"])
    assert all(norm > 0.05 for norm in expected["norms"])  # so that clipping has something to do


def test_a_step_of_one_model_leaves_the_gradients_of_another_alone(qwen: str, engine: Ranks) -> None:
    """Defect absent: one list of parameters, overwritten by the last optimizer, so that the actor's step clipped the
    critic's gradients."""

    def step_one() -> Any:
        s = FSDPV2Strategy(bf16=False, max_norm=1e-3)
        actor, critic = (s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), True) for _ in range(2))
        first = s.create_optimizer(actor, lr=1e-2)
        s.create_optimizer(critic, lr=1e-2)
        for model in (actor, critic):
            s.backward(language_loss(model, share(rows(4), s)), model)
        before = whole({n: p.grad for n, p in critic.named_parameters()})
        s.optimizer_step(first, actor, None, name="actor")
        return before, whole({n: p.grad for n, p in critic.named_parameters()}), [p.grad for p in actor.parameters()]

    before, after, own = engine.run(step_one)[0]
    assert_close(after, before, atol=0.0)
    assert own == [None] * len(own)


def test_actor_and_critic_accumulate_apart_even_under_one_name(qwen: str, engine: Ranks) -> None:
    def alternate() -> Any:
        s = FSDPV2Strategy(bf16=False, micro_train_batch_size=1, train_batch_size=4)
        models = [s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), True) for _ in range(2)]
        optimizers = [s.create_optimizer(model, lr=1e-2) for model in models]
        stepped = []
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                s.backward(language_loss(model, share(rows(2), s)), model, optimizer)
                stepped.append(s.optimizer_step(optimizer, model, None)["stepped"])
        return stepped, s.accumulated_gradient

    assert engine.run(alternate)[0] == ([False, False, True, True], 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_is_dropped_on_all_without_a_scheduler_step(
    qwen: str, engine: Ranks, bad: float
) -> None:
    def poisoned() -> Any:
        s = FSDPV2Strategy(bf16=False)
        model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), True)
        optimizer = s.create_optimizer(model, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        before = whole(dict(model.named_parameters()))
        loss = language_loss(model, share(rows(4), s)) * (bad if s.rank == 1 else 1.0)
        s.backward(loss, model, optimizer)
        result, said = said_by(lambda: s.optimizer_step(optimizer, model, scheduler))
        same = all(torch.equal(t, before[n]) for n, t in whole(dict(model.named_parameters())).items())
        cleared = all(p.grad is None for p in model.parameters())
        rate = optimizer.param_groups[0]["lr"]
        s.backward(language_loss(model, share(rows(4), s)), model, optimizer)
        good = s.optimizer_step(optimizer, model, scheduler)["stepped"]
        return result["stepped"], same, cleared, rate, good, optimizer.param_groups[0]["lr"], said

    found = engine.run(poisoned)
    for stepped, same, cleared, rate, good, later, _ in found:
        assert (stepped, same, cleared, rate, good, later) == (False, True, True, 1e-2, True, 5e-3)
    assert "optimizer step skipped: the gradient norm is" in found[0][-1] and found[1][-1] == ""


def test_clipping_holds_over_groups_of_different_meshes_dtypes_and_no_mesh(qwen: str, engine: Ranks) -> None:
    """torch's own clip_grad_norm_ raises here, as all operands must have one mesh."""

    def mixed() -> Any:
        s = FSDPV2Strategy(bf16=False)
        torch.manual_seed(3)
        sharded, replicated, alone = (nn.Linear(4, 4, bias=False) for _ in range(3))
        alone.to(torch.bfloat16)
        s.prepare_model(sharded, True)
        s.prepare_model(replicated, True, shard_size=1)
        layers = (sharded, replicated, alone)
        groups = [group for layer in layers for group in parameter_groups(layer, 0.0)]
        optimizer = torch.optim.SGD(groups, lr=0.0)
        for layer in layers:
            layer(torch.ones(1, 4, dtype=layer.weight.dtype)).sum().backward()
        norm = s.step_now(optimizer, sharded, max_norm=0.5)["grad_norm"]
        for layer in layers:
            layer(torch.ones(1, 4, dtype=layer.weight.dtype)).sum().backward()
        optimizer.zero_grad = lambda set_to_none=True: None
        s.step_now(optimizer, sharded, max_norm=0.5)
        return norm, {str(i): whole({"g": layer.weight.grad})["g"] for i, layer in enumerate(layers)}

    for norm, gradients in engine.run(mixed):
        assert norm == pytest.approx(48**0.5)  # three layers of 16 ones
        total = sum(float(g.float().square().sum()) for g in gradients.values()) ** 0.5
        assert total == pytest.approx(0.5, rel=1e-2)


def test_groups_are_of_one_dtype_one_shard_count_and_one_decay() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).to(torch.bfloat16), "norm": nn.LayerNorm(2)})
    model["a"].weight.requires_grad_(True)
    model["b"].bias.requires_grad_(False)
    groups = parameter_groups(model, 0.3)
    found = sorted((str(g["params"][0].dtype), g["weight_decay"], len(g["params"])) for g in groups)
    assert found == [("torch.bfloat16", 0.3, 1), ("torch.float32", 0.0, 3), ("torch.float32", 0.3, 1)]
    assert not decays("layers.0.self_attn.q_norm.weight", torch.zeros(2, 2))
    assert not decays("h.0.ln_f.weight", torch.zeros(2, 2)) and decays("score.weight", torch.zeros(1, 2))
    with pytest.raises(EngineError, match="no trainable parameter"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.0)


def test_backward_passes_what_torch_takes_on_and_refuses_what_it_does_not_know(qwen: str, engine: Ranks) -> None:
    def twice() -> Any:
        s = FSDPV2Strategy(bf16=False)
        layer = nn.Linear(2, 1, bias=False)
        loss = layer(torch.ones(1, 2)).sum()
        s.backward(loss, layer, retain_graph=True)
        s.backward(loss, layer)
        try:
            s.backward(layer(torch.ones(1, 2)).sum(), layer, retain=True)
        except TypeError as error:
            return layer.weight.grad.tolist(), str(error)

    gradient, refusal = engine.run(twice)[0]
    assert gradient == [[2.0, 2.0]] and "retain" in refusal


def test_one_step_may_be_clipped_otherwise(qwen: str, engine: Ranks) -> None:
    def steps() -> Any:
        s = FSDPV2Strategy(bf16=False, max_norm=0.0)
        layer = s.prepare_model(nn.Linear(2, 1, bias=False), True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        before = whole({"w": layer.weight})["w"]
        s.backward(layer(torch.full((1, 2), 10.0)).sum(), layer, optimizer)
        s.optimizer_step(optimizer, layer, None, max_norm=1e-2)
        return float((whole({"w": layer.weight})["w"] - before).norm())

    assert engine.run(steps)[0] == pytest.approx(1e-2, rel=1e-3)


def test_run_steps_of_bf16_compute_over_float32_weights(qwen: str, engine: Ranks) -> None:
    def trained(bf16: bool) -> Any:
        s = FSDPV2Strategy(bf16=bf16)
        model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), True)
        optimizer = s.create_optimizer(model, lr=1e-3)
        seen: list[Any] = []
        model.model.layers[0].mlp.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
        run_steps(s, model, optimizer, [[rows(4)]])
        return str(seen[0]), {str(p.dtype) for p in model.parameters()}

    assert engine.run(trained, True)[0] == ("torch.bfloat16", {"torch.float32"})
    assert engine.run(trained, False)[0] == ("torch.float32", {"torch.float32"})
