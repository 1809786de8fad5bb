"""Float16 with a scaled loss: gradients of float32, seen unscaled by everybody, on ranks and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from rlbench.strategies import FakeStrategy, FSDPV2Strategy
from rlbench.strategies.optim.loss_scale import LossScale
from tests.modules import qwen_on_meta
from tests.ranks import Ranks, ranks
from tests.strategies.surface import language_loss, rows, share, whole

START = 2.0**16


class Table(nn.Module):
    """One weight for each of four inputs; `steep` multiplies what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.layer.weight, 0.5)

    def forward(self, steep: float) -> Tensor:
        return self.layer(torch.eye(4).to(self.layer.weight.dtype)).float().sum() * steep


def asked(kind: type, **options: Any) -> Any:
    return kind(args={"fp16": True, "train_batch_size": 1, "max_norm": 0.0, **options})


def held(s: Any, model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    prepared = s.prepare_model(model, is_training=True)
    return prepared, torch.optim.SGD(prepared.parameters(), lr=0.25)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def far(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm."""
    one, other = (torch.cat([t.flatten() for t in each.values()]) for each in (found, expected))
    return float((one - other).norm() / other.norm())


# -- the gradients


def at_scale(kind: type, path: str, scale: float, calls: int = 1) -> dict[str, Tensor]:
    s = asked(kind)
    model, _ = held(s, Qwen2ForCausalLM.from_pretrained(path))
    s.steps._scale_of(model).value = scale
    for seed in range(calls):
        s.backward(language_loss(model, share(rows(4, seed), s)), model)
    return gradients(model)


def in_float32(path: str, calls: int = 1) -> dict[str, Tensor]:
    model = Qwen2ForCausalLM.from_pretrained(path)
    for seed in range(calls):
        language_loss(model, rows(4, seed)).backward()
    return gradients(model)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_gradients_are_those_of_float32_whatever_the_scale(qwen: str, count: int, calls: int) -> None:
    """Also where two backwards accumulate; on `count` ranks, 0: without. One and two are FSDP's two ways to divide."""
    if count:
        with ranks(count, qwen_on_meta(qwen)) as engine:
            one, other = engine.run(
                lambda: [at_scale(FSDPV2Strategy, qwen, scale, calls) for scale in (START, START / 2)]
            )[0]
    else:
        one, other = (at_scale(FakeStrategy, qwen, scale, calls) for scale in (START, START / 2))
    assert far(one, in_float32(qwen, calls)) < 2e-3
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {g.dtype for g in one.values()} == {torch.float32}


def test_two_ranks_and_a_mesh_of_replicas_give_the_gradients_of_one(qwen: str, engine: Ranks) -> None:
    def replicated() -> Any:
        s = asked(FSDPV2Strategy)
        model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), True, shard_size=1)
        s.backward(language_loss(model, share(rows(4), s)), model)
        return gradients(model)

    expected = at_scale(FakeStrategy, qwen, START)
    assert far(engine.run(lambda: at_scale(FSDPV2Strategy, qwen, START))[0], expected) < 2e-3
    assert far(engine.run(replicated)[0], expected) < 2e-3


def small(kind: type) -> Any:
    """Gradients of a loss that is too small for float16, scaled and by a plain backward; then of a plain loss."""
    s = asked(kind)
    model, _ = held(s, Table())
    found = []
    for backward in (lambda loss: s.backward(loss, model), lambda loss: loss.backward()):
        for steep in (1e-8, 0.5):
            backward(model(steep))
            found.append(gradients(model)["layer.weight"].flatten().tolist())
            s.forget_gradients(model)
    return found


def test_what_vanishes_in_float16_is_there_and_a_plain_backward_stays_plain(engine: Ranks) -> None:
    for scaled_small, scaled, plain_small, plain in [small(FakeStrategy), *engine.run(lambda: small(FSDPV2Strategy))]:
        assert scaled_small == pytest.approx([1e-8] * 4, rel=1e-3)
        assert plain_small == [0.0] * 4
        assert scaled == plain == [0.5] * 4


# -- the step


def overflow(kind: type) -> Any:
    """Two backwards of which one overflows, a step, and a good one."""
    s = asked(kind)
    model, optimizer = held(s, Table())
    before = whole(dict(model.named_parameters()))
    for steep in (0.25, 100.0):
        s.backward(model(steep), model, optimizer)
    skipped = s.optimizer_step(optimizer, model)
    after = whole(dict(model.named_parameters()))
    same = all(torch.equal(after[name], before[name]) for name in before)
    scale = s.loss_scale(model)
    cleared = all(p.grad is None for p in model.parameters())
    s.backward(model(0.5), model, optimizer)
    stepped = s.optimizer_step(optimizer, model)
    return skipped, same, cleared, scale, stepped, whole(dict(model.named_parameters()))["layer.weight"].flatten()


def test_an_overflow_skips_its_step_halves_the_scale_and_the_next_step_works(engine: Ranks) -> None:
    for skipped, same, cleared, scale, stepped, weight in [
        overflow(FakeStrategy),
        *engine.run(lambda: overflow(FSDPV2Strategy)),
    ]:
        assert not skipped["stepped"] and skipped["loss_scale"] == START and same and cleared
        assert "the loss scale goes from 65536 to 32768" in skipped["skipped"]
        assert scale == START / 2
        assert stepped["stepped"] and stepped["loss_scale"] == START / 2 and stepped["skipped"] is None
        assert stepped["grad_norm"] == pytest.approx(1.0)  # of four gradients of a half
        assert weight.tolist() == [0.375] * 4


def test_clipping_is_by_the_norm_of_what_is_seen(engine: Ranks) -> None:
    def clipped() -> Any:
        s = asked(FSDPV2Strategy, max_norm=0.5)
        model, optimizer = held(s, Table())
        s.backward(model(0.5), model, optimizer)
        return s.optimizer_step(optimizer, model)["grad_norm"], whole(dict(model.named_parameters()))["layer.weight"]

    norm, weight = engine.run(clipped)[0]
    assert norm == pytest.approx(1.0)
    assert weight.flatten().tolist() == pytest.approx([0.5 - 0.25 / 4] * 4, rel=1e-4)


def test_the_scale_rises_after_a_thousand_good_steps_within_its_bounds() -> None:
    scale = LossScale()
    for _ in range(999):
        scale.update(True)
    assert scale.value == START
    scale.update(True)
    assert scale.value == 2 * START
    for _ in range(40_000):
        scale.update(True)
    assert scale.value == 2.0**24
    for _ in range(999):
        scale.update(True)
    scale.update(False)
    scale.update(True)  # counted anew
    assert scale.value == 2.0**23
    for _ in range(40):
        scale.update(False)
    assert scale.value == 1.0


def test_a_step_at_the_least_scale_says_that_it_is_not_the_scale() -> None:
    s = asked(FakeStrategy)
    model, optimizer = held(s, Table())
    s.steps._scale_of(model).value = 1.0
    s.backward(model(float("nan")), model, optimizer)
    assert "the loss scale stays 1: the model itself overflows" in s.optimizer_step(optimizer, model)["skipped"]


def test_a_loss_of_two_models_is_unscaled_in_both(engine: Ranks) -> None:
    def joint(kind: type) -> Any:
        s = asked(kind)
        one, two = (s.prepare_model(Table(), is_training=True) for _ in range(2))
        s.backward(one(0.25) + two(0.5), one)
        return [gradients(model)["layer.weight"].flatten().tolist() for model in (one, two)]

    for found in (joint(FakeStrategy), engine.run(lambda: joint(FSDPV2Strategy))[0]):
        assert found == [[0.25] * 4, [0.5] * 4]


def test_each_model_has_a_scale_of_its_own_and_others_have_none() -> None:
    s = asked(FakeStrategy)
    (one, optimizer), (two, _) = held(s, Table()), held(s, Table())
    s.backward(one(100.0), one)
    s.optimizer_step(optimizer, one)
    assert (s.loss_scale(one), s.loss_scale(two)) == (START / 2, START)
    plain = FakeStrategy(bf16=False)
    model, optimizer = held(plain, Table())
    plain.backward(model(1.0), model)
    assert plain.loss_scale(model) == 1.0 and "loss_scale" not in plain.optimizer_step(optimizer, model)


def test_forwards_compute_in_float16_over_float32_weights(qwen: str, engine: Ranks) -> None:
    def seen(kind: type) -> Any:
        s = asked(kind)
        model, _ = held(s, Qwen2ForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16))
        dtypes: list[torch.dtype] = []
        model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
        language_loss(model, rows(2))
        return dtypes, {p.dtype for p in model.parameters()}

    for found in (seen(FakeStrategy), engine.run(lambda: seen(FSDPV2Strategy))[0]):
        assert found == ([torch.float16], {torch.float32})


@pytest.mark.gpu
def test_a_step_in_float16_on_a_gpu(qwen: str) -> None:
    """Torch alone: autocast, the scale, and the step; and what this GPU would choose by itself."""
    s = asked(FakeStrategy)
    assert s.device.is_gpu
    model, optimizer = held(s, Qwen2ForCausalLM.from_pretrained(qwen))
    ids = torch.tensor(rows(4), device=s.device.device)
    logits = model(ids).logits[:, :-1]
    assert logits.dtype == torch.float16
    s.backward(nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()), model)
    assert far({name: g.cpu() for name, g in gradients(model).items()}, in_float32(qwen)) < 2e-2
    result = s.optimizer_step(optimizer, model)
    assert result["stepped"] and result["loss_scale"] == START
    capability = s.device.capability
    assert capability is not None and (capability >= (8, 0)) == torch.cuda.is_bf16_supported(including_emulation=False)
