"""Routers that take the experts which rows bring: held to plain transformers with forced experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlbench.data.base.ragged import Ragged
from rlbench.data.base.routing import FAMILIES
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import BuildError, DataError
from rlbench.trainers.passes.forward import PolicyModel
from rlbench.trainers.passes.routing import check_experts, check_replayed, check_routed, routers_of
from tests.modules import RAGGED, TrainedQwen, batch_of
from tests.trainers.routed_models import forced_logprobs, mixture, own_experts, random_experts, routers

CPU = torch.device("cpu")
LAYERS, EXPERTS = 2, 4


def batch() -> TrainBatch:
    return random_experts(batch_of(RAGGED), LAYERS, EXPERTS)


def own(model: Any, rows: TrainBatch) -> Ragged:
    """The experts that the model takes by itself, as a sampler with its weights would say."""
    ids = [np.concatenate(pair) for pair in zip(rows.prompts, rows.responses, strict=True)]
    values = np.concatenate([own_experts(model, one) for one in ids]).astype(np.int16)
    return Ragged(values, np.concatenate([[0], np.cumsum(rows.lengths)]))


def taken(model: Any) -> list[list[Tensor]]:
    """What the experts of each layer are given to compute, pass by pass; filled while the model runs."""
    seen: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    parts = [part for part in model.modules() if type(part).__name__.endswith("Experts")]
    for layer, part in enumerate(parts):
        part.register_forward_pre_hook(lambda _, args, layer=layer: seen[layer].append(args[1].clone()))
    return seen


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_every_token_and_layer_are_those_that_rows_bring(family: str, packed: bool) -> None:
    model, rows = mixture(family), batch()
    seen = taken(model)
    policy = PolicyModel(model, CPU, half=False, replay=True)
    with torch.no_grad(), policy.stats(rows, 1.0, packed) as (found, inputs):
        experts = inputs.routing.experts
        assert int((experts[:, 0, 0] >= 0).sum()) == int(rows.lengths.sum()) - len(rows)
        for layer in range(LAYERS):
            wanted, got = experts[:, layer].long(), seen[layer][-1]
            known = wanted[:, 0] >= 0
            assert torch.equal(wanted[known], got[known])
    with torch.no_grad():
        torch.testing.assert_close(found.logprobs, forced_logprobs(model, rows), rtol=0, atol=1e-5)
    assert not any(router._forward_hooks for router in routers(model))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_takes_the_experts_that_rows_bring(family: str) -> None:
    model, rows = mixture(family), batch()
    with torch.no_grad():
        wanted = forced_logprobs(model, rows)
        policy = PolicyModel(model.cuda(), torch.device("cuda", 0), half=False, replay=True)
        with policy.stats(rows, 1.0, packed=False) as (found, inputs):
            torch.testing.assert_close(found.logprobs.cpu(), wanted, rtol=0, atol=1e-4)
            other, counted = inputs.routing.disagreement()
    assert int(counted) == LAYERS * (int(rows.lengths.sum()) - len(rows)) and 0 < int(other) < int(counted)


def test_a_dense_layer_takes_no_experts_and_the_others_theirs() -> None:
    model = mixture("qwen3_moe", mlp_only_layers=[0])
    assert list(routers_of(model)) == [1]
    rows = batch()
    forced_rows = rows.replace(routing=rows.routing.with_values(rows.routing.values[:, 1:]))
    with torch.no_grad(), PolicyModel(model, CPU, half=False, replay=True).stats(rows, 1.0, True) as (found, inputs):
        assert inputs.routing.disagreement()[1] == float(rows.lengths.sum()) - len(rows)
    with torch.no_grad():
        torch.testing.assert_close(found.logprobs, forced_logprobs(model, forced_rows), rtol=0, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_plain_transformers_with_forced_experts(family: str, recompute: bool) -> None:
    model, rows = mixture(family), batch()
    weights = torch.from_numpy(rows.advantages)
    (weights * forced_logprobs(model, rows)).sum().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    with PolicyModel(model, CPU, half=False, replay=True).stats(rows, 1.0, True) as (found, _):
        (weights * found.logprobs).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-5, msg=name)
    assert all(router.weight.grad.abs().max() > 1e-3 for router in routers(model))  # gradients flow into the routers


def test_noise_in_the_routers_moves_log_probs_by_other_experts_unless_they_are_replayed() -> None:
    model, rows = mixture("qwen3_moe"), batch()
    rows = rows.replace(routing=own(model, rows))
    torch.manual_seed(3)
    with torch.no_grad():
        for router in routers(model):
            router.weight += 0.05 * torch.randn_like(router.weight)
    found, shares = {}, {}
    for replay in (False, True):
        with torch.no_grad(), PolicyModel(model, CPU, False, replay=replay).stats(rows, 1.0, True) as (given, inputs):
            found[replay] = given.logprobs
            shares[replay] = inputs.routing.disagreement()
    with torch.no_grad():
        same_experts = forced_logprobs(model, rows)
    assert (
        float((found[True] - same_experts).abs().max()) < 1e-5 < 1e-2 < float((found[False] - same_experts).abs().max())
    )
    different, known = shares[False]
    assert known == LAYERS * int(rows.lengths.sum()) and 0 < different < known
    assert 0 < shares[True][0] and shares[True][1] == known


def test_routers_that_agree_are_counted_as_such_and_compute_what_they_did() -> None:
    model, rows = mixture("olmoe"), batch()
    agreeing = rows.replace(routing=own(model, rows))
    found = []
    for one, replay in ((rows.replace(routing=None), False), (agreeing, False), (agreeing, True)):
        with torch.no_grad(), PolicyModel(model, CPU, False, replay=replay).stats(one, 1.0, False) as (given, inputs):
            found.append(given.logprobs)
    assert inputs.routing.disagreement() == (0.0, LAYERS * float(rows.lengths.sum()))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=1e-6)


def test_sampled_tokens_without_experts_are_refused() -> None:
    rows = batch()
    check_routed(rows)
    with pytest.raises(DataError, match=r"7 of 7 sequences .*return_routed_experts=True"):
        check_routed(rows.replace(routing=None))
    values = rows.routing.values.copy()
    values[rows.routing.offsets[2] + 1] = -1
    lacking = rows.replace(routing=rows.routing.with_values(values))
    with pytest.raises(DataError, match=r"1 of 7 sequences \(the first: 2\)"):
        check_routed(lacking)
    check_routed(lacking.replace(mask=lacking.mask & (np.repeat(np.arange(7), lacking.response_lengths) != 2)))
    check_routed(rows.replace(routing=None, sampler_logprobs=np.full(rows.tokens, np.nan, np.float32)))  # texts


def test_experts_of_another_model_and_models_without_routers_are_refused(qwen: str) -> None:
    model = mixture("mixtral")
    for layers, experts in ((LAYERS - 1, EXPERTS), (LAYERS, EXPERTS + 1)):
        with pytest.raises(DataError, match=rf"in each of {layers} layers, and Mixtral.* chooses 2 of 4 in 2 layers"):
            check_experts(model, random_experts(batch_of(RAGGED), layers, experts))
    check_experts(model, batch())
    dense = TrainedQwen.from_pretrained(qwen)
    assert routers_of(dense) == {}
    with pytest.raises(BuildError, match="TrainedQwen has no router that can be given experts"):
        check_replayed(dense)
