"""The mixed-precision optimizer: float32 copies of half-precision parameters, the loss scale of float16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2ForCausalLM

from rlbench.errors import EngineError
from rlbench.strategies import FSDPadaptOptimizer, FSDPV2Strategy, is_mp_optimizer
from rlbench.strategies.optim.mp_optimizer import GROWTH_INTERVAL
from tests.ranks import Ranks
from tests.strategies.surface import assert_close, language_loss, rows, run_steps, share, state_of, whole


def layer_of(dtype: torch.dtype, start: float = 1.0) -> nn.Linear:
    layer = nn.Linear(4, 1, bias=False, dtype=dtype)
    nn.init.constant_(layer.weight, start)
    return layer


def stepped(layer: nn.Linear, optimizer: FSDPadaptOptimizer, gradient: float = 1.0) -> bool:
    optimizer.backward((layer.weight.float() * gradient).sum())
    return optimizer.step()


def test_steps_too_small_for_half_precision_add_up_in_the_copies() -> None:
    layer = layer_of(torch.bfloat16)
    optimizer = FSDPadaptOptimizer(torch.optim.SGD(layer.parameters(), lr=1e-3))
    assert is_mp_optimizer(optimizer) and not is_mp_optimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    for _ in range(16):
        assert stepped(layer, optimizer)
    assert layer.weight.dtype == torch.bfloat16
    torch.testing.assert_close(optimizer.state[layer.weight]["master"], torch.full((1, 4), 1 - 16e-3))
    assert layer.weight.tolist() == torch.full((1, 4), 1 - 16e-3).bfloat16().tolist()
    plain = layer_of(torch.bfloat16)
    with torch.no_grad():
        for _ in range(16):
            plain.weight -= 1e-3
    assert plain.weight.tolist() == [[1.0] * 4]  # what the copies are for


def test_it_takes_parameters_as_the_document_does_and_schedulers_take_it() -> None:
    """The seed's own example: `FSDPadaptOptimizer(model_parameters, lr=0.01)`."""
    layer = layer_of(torch.bfloat16)
    optimizer = FSDPadaptOptimizer(layer.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    moves = []
    for _ in range(2):
        before = optimizer.state[layer.weight].get("master", layer.weight.detach().float()).clone()
        stepped(layer, optimizer)
        scheduler.step()
        moves.append(float((before - optimizer.state[layer.weight]["master"]).mean()))
    assert moves == pytest.approx([0.01 + 1e-4, 0.001], rel=2e-2)  # AdamW's first steps are lr; decay 0.01 of it beside
    with pytest.raises(EngineError, match="'lr' belongs to the optimizer"):
        FSDPadaptOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), lr=0.1)


def test_float16_gradients_are_scaled_an_overflow_is_skipped_and_the_scale_grows_again() -> None:
    """Defect absent: a scale of 1 that never changed, so that small float16 gradients were zero."""
    layer = layer_of(torch.float16, start=0.0)
    optimizer = FSDPadaptOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    first = optimizer.loss_scale
    tiny = 2.0**-26  # zero in float16
    assert first > 1 and stepped(layer, optimizer, tiny)
    assert optimizer.grad_norm == pytest.approx(2 * tiny)
    master = optimizer.state[layer.weight]["master"].clone()
    assert master.tolist() == [[-tiny] * 4]
    assert not stepped(layer, optimizer, 10.0)
    assert optimizer.loss_scale == first / 2 and layer.weight.grad is None
    assert torch.equal(optimizer.state[layer.weight]["master"], master)
    for _ in range(GROWTH_INTERVAL):
        stepped(layer, optimizer, tiny)
    assert optimizer.loss_scale == first


def test_an_optimizer_that_has_stepped_before_keeps_its_momentum() -> None:
    layer = layer_of(torch.bfloat16)
    inner = torch.optim.SGD(layer.parameters(), lr=0.25, momentum=0.5)
    layer.weight.sum().backward()
    inner.step()
    layer.weight.grad = None
    optimizer = FSDPadaptOptimizer(inner)
    stepped(layer, optimizer)
    assert layer.weight.tolist() == [[1 - 0.25 - 0.25 * 1.5] * 4]
    assert optimizer.state[layer.weight]["momentum_buffer"].dtype == torch.float32


def test_float16_gradients_that_were_not_scaled_are_noticed() -> None:
    layer = layer_of(torch.float16)
    optimizer = FSDPadaptOptimizer(layer.parameters())
    layer.weight.sum().backward()
    with pytest.raises(EngineError, match=r"not scaled.*strategy\.backward\(loss, model, optimizer\)"):
        optimizer.step()


def test_bfloat16_needs_no_scale() -> None:
    assert FSDPadaptOptimizer(layer_of(torch.bfloat16).parameters()).loss_scale == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_clipping_is_of_the_unscaled_norm_and_only_where_it_is_asked_for(dtype: torch.dtype) -> None:
    """Defect absent: a threshold of 1.0 built in, whatever the strategy was told."""
    moved = {}
    for limit in (0.0, 0.5):
        layer = layer_of(dtype)
        optimizer = FSDPadaptOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), max_norm=limit)
        stepped(layer, optimizer, 0.75)
        assert optimizer.grad_norm == pytest.approx(1.5)
        moved[limit] = float((1 - optimizer.state[layer.weight]["master"]).norm())
    assert moved == pytest.approx({0.0: 1.5, 0.5: 0.5}, rel=1e-3)


def test_weights_that_somebody_loaded_are_not_undone_by_the_copies() -> None:
    layer = layer_of(torch.bfloat16)
    optimizer = FSDPadaptOptimizer(torch.optim.SGD(layer.parameters(), lr=0.25))
    stepped(layer, optimizer)
    with torch.no_grad():
        layer.weight[0, :2] = 8.0
    stepped(layer, optimizer)
    assert optimizer.state[layer.weight]["master"].tolist() == [[7.75, 7.75, 0.5, 0.5]]


def test_its_state_dict_comes_back_in_float32_with_scale_and_goes_on_the_same() -> None:
    """torch's own load_state_dict would round the copies to the parameters' dtype."""
    layer = layer_of(torch.float16)
    optimizer = FSDPadaptOptimizer(layer.parameters(), lr=1e-3)
    stepped(layer, optimizer, 10.0)  # an overflow: another scale
    for _ in range(3):
        stepped(layer, optimizer, 1e-3)
    twin = copy.deepcopy(layer)
    other = FSDPadaptOptimizer(twin.parameters(), lr=1e-3)
    other.load_state_dict(optimizer.state_dict())
    assert other.loss_scale == optimizer.loss_scale
    assert other.state[twin.weight]["master"].dtype == torch.float32
    for held, own in ((layer, optimizer), (twin, other)):
        stepped(held, own, 1e-3)
    for key in ("master", "exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(other.state[twin.weight][key], optimizer.state[layer.weight][key]), key


def by_hand(path: str, steps: list[Any]) -> dict[str, Any]:
    """bfloat16 forward and backward, float32 AdamW over copies, in one process."""
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    copies = {n: nn.Parameter(p.detach().float()) for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(copies.values(), lr=1e-3, weight_decay=0.0)
    for data in steps:
        for half in (data[:2], data[2:]):
            (language_loss(model, half) / 2).backward()
        for name, parameter in model.named_parameters():
            copies[name].grad = parameter.grad.float()
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(copies[name])
    return {name: value.detach() for name, value in copies.items()}


def test_use_mp_opt_trains_half_precision_shards_with_float32_copies(qwen: str, engine: Ranks) -> None:
    steps = [rows(4, seed) for seed in range(3)]

    def train() -> Any:
        s = FSDPV2Strategy(args={"use_mp_opt": True})
        model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), is_training=True)
        optimizer = s.create_optimizer(model, lr=1e-3, weight_decay=0.0)
        results = run_steps(s, model, optimizer, [[data] for data in steps])
        state = state_of(model, optimizer)
        masters = {n.removesuffix("/master"): t for n, t in state.items() if n.endswith("master")}
        kinds = {str(p.dtype) for p in model.parameters()}
        copied = all(torch.equal(masters[n].bfloat16(), p) for n, p in whole(dict(model.named_parameters())).items())
        dtype = str(optimizer.state_dict()["state"][0]["master"].dtype)
        return masters, kinds, copied, results, type(optimizer).__name__, dtype

    masters, kinds, copied, results, name, dtype = engine.run(train)[0]
    assert (kinds, copied, name, dtype) == ({"torch.bfloat16"}, True, "FSDPadaptOptimizer", "torch.float32")
    assert all(result["stepped"] for result in results)
    expected = by_hand(qwen, steps)
    before = {n: p.detach() for n, p in Qwen2ForCausalLM.from_pretrained(qwen).named_parameters()}
    travelled = sum(float((expected[n] - before[n]).norm()) for n in expected)
    apart = sum(float((expected[n] - masters[n]).norm()) for n in expected)
    assert apart < 0.15 * travelled  # gradients are bfloat16 sums, in another order


def test_a_pair_gets_the_mixed_precision_optimizer_and_a_nan_on_one_rank_skips_on_all(qwen: str, engine: Ranks) -> None:
    def poisoned() -> Any:
        s = FSDPV2Strategy(args={"use_mp_opt": True})
        model = Qwen2ForCausalLM.from_pretrained(qwen)
        model, optimizer = s.prepare_model((model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
        before = whole(dict(model.named_parameters()))
        loss = language_loss(model, share(rows(4), s)) * (float("nan") if s.rank else 1.0)
        s.backward(loss, model, optimizer)
        result = s.optimizer_step(optimizer, model, None)
        after = whole(dict(model.named_parameters()))
        try:
            s.backward(language_loss(model, share(rows(4), s)), model)
        except EngineError as error:
            return is_mp_optimizer(optimizer), result["stepped"], before, after, str(error)

    for is_mp, did, before, after, refusal in engine.run(poisoned):
        assert is_mp and not did and "pass it: backward(loss, model, optimizer)" in refusal
        assert_close(after, before, atol=0.0)
