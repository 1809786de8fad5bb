"""Options of DeepSpeed's own: a second copy of the weights, sums of gradients, overlapped reductions."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from rlbench.strategies.optim.gradients import scale_waiting
from rlbench.strategies.options.config import OptionError, StrategyConfig
from rlbench.strategies.zero.engine import zero_of
from rlbench.strategies.zero.settings import check, settings
from tests.modules import qwen_on_meta
from tests.ranks import Ranks, ranks
from tests.strategies.surface import assert_close, language_loss, rows, run_steps, share, train_by_hand
from tests.strategies.test_deepspeed import STEPS, made, weights, zero

pytestmark = pytest.mark.slow


def parted(given: dict[str, Any]) -> dict[str, Any]:
    """Settings in which no parameter is too small, or used again too soon, to be split between forward and backward."""
    split = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    return {**given, "zero_optimization": {**given["zero_optimization"], **split}}


def number_from_zero() -> None:
    """Let DeepSpeed number modules and parameters anew: ranks compare theirs, and some processes were ranks before."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    (count,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    count[0] = 0


def train_with_copies(path: str, folder: str, zpg: int) -> Any:
    """Steps, a checkpoint, a forward beside it, and a step from the checkpoint; what each rank keeps of a copy."""
    from rlbench.strategies import deepspeed as room

    number_from_zero()
    with mock.patch.object(room, "settings", lambda *args, **own: parted(settings(*args, **own))):
        s = zero({"zero_stage": 3, "zpg": zpg})
        model, optimizer, _ = made(s, path)
        frozen = s.prepare_model(Qwen2ForCausalLM.from_pretrained(path))
    results = run_steps(s, model, optimizer, [STEPS[0][:1]])
    s.save_ckpt(model, folder, f"of-{zpg}", optimizer=optimizer)
    results += run_steps(s, model, optimizer, [STEPS[2][:1]])
    with torch.no_grad():
        model(torch.tensor(rows(2, 3)))  # leaves copies of these weights
    part = model.model.layers[0].mlp.up_proj.weight
    kept = 0 if part.ds_secondary_tensor is None else part.ds_secondary_tensor.numel() * zpg / part.ds_numel
    s.load_ckpt(model, f"{folder}/of-{zpg}", optimizer)
    with torch.no_grad():
        logits = [model(torch.tensor(rows(2, 3))).logits, frozen(torch.tensor(rows(2, 3))).logits]
    s.moving_average(model, frozen, beta=0.5)
    with torch.no_grad():
        logits.append(frozen(torch.tensor(rows(2, 3))).logits)
    results += run_steps(s, model, optimizer, [STEPS[1][:1]])
    if zpg > 1:
        s.save_model(model, None, f"{folder}/hf")
    return results, logits, kept, weights(s, model)


def test_a_second_copy_of_the_weights_changes_no_step_and_is_never_one_of_before(qwen: str, tmp_path: Path) -> None:
    """Defect absent: a checkpoint is loaded, and the backward gathers the weights of before from the copy."""
    with ranks(4, qwen_on_meta(qwen)) as engine:
        found = engine.run(train_with_copies, qwen, str(tmp_path), 2)
        (plain, expected, none, whole_weights), *_ = engine.run(train_with_copies, qwen, str(tmp_path), 1)
        results, logits, _, own = found[0]
        assert results == plain and all(map(torch.equal, logits, expected))
        assert all(torch.equal(own[name], whole_weights[name]) for name in whole_weights)
        assert none == 0 and [kept for _, _, kept, _ in found] == [1.0] * 4
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        assert_close(dict(saved.named_parameters()), own, atol=0)
        with pytest.raises(OptionError, match="zpg=3 does not divide 4 ranks"):
            engine.run(lambda: zero({"zero_stage": 3, "zpg": 3}))
    with pytest.raises(OptionError, match=r"zpg=2 cannot be honoured with zero_stage=2, .* take zero_stage=3"):
        check(StrategyConfig(zero_stage=2, zpg=2))


def far_from_its_multiple(kind: dict[str, Any], bf16: bool) -> float:
    """How far a sum of twenty equal gradients is from twenty times one, as a share of it."""
    inputs, mean, s = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)), [], zero(kind, bf16=bf16)
    model = nn.Linear(16, 16)
    model, optimizer = s.prepare((model, torch.optim.SGD(model.parameters(), lr=1.0)))
    for calls in (1, 20):  # the gradient of a sum of outputs is the same wherever the weights are
        before = [flat.clone() for flat in zero_of(model).flats()]
        for call in range(-1, calls):
            if call == 0:
                s.forget_gradients(model)
            s.backward(model(inputs.to(model.weight.dtype)).float().mean(), model, reduction="sum")
        s.step_now(optimizer, model)
        mean.append(torch.cat([then - now for then, now in zip(before, zero_of(model).flats(), strict=True)]) / calls)
    return float((mean[1] - mean[0]).norm() / mean[0].norm())


def test_gradients_are_added_up_in_the_dtype_of_grad_accum_dtype(engine: Ranks) -> None:
    """Defect absent: a sum in bfloat16 that stands still although it was asked for in float32."""
    fine = [(True, {"zero_stage": 1, "adam_offload": True}), *((True, {"zero_stage": stage}) for stage in (2, 3))]
    fine += [(True, {"zero_stage": 2, "adam_offload": True})]
    coarse = [(True, {"zero_stage": 1}), (True, {"zero_stage": 2}), (False, {"zero_stage": 3})]
    given = [(bf16, {**kind, "grad_accum_dtype": "fp32"}) for bf16, kind in fine]
    given += [(bf16, {**kind, "grad_accum_dtype": "bf16"}) for bf16, kind in coarse] + [(True, {"zero_stage": 3})]
    found = engine.run(lambda: [far_from_its_multiple(kind, bf16) for bf16, kind in given])[0]
    assert max(found[: len(fine)]) < 1e-5 and min(found[len(fine) :]) > 3e-3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"zero_stage": 1, "bf16": True, "grad_accum_dtype": "fp32"}, "bf16, .* take zero_stage=2 or 3"),
        ({"zero_stage": 2, "bf16": True, "grad_accum_dtype": "fp16"}, r"\(bf16\) or in fp32: take zero_stage=1 or 3"),
        ({"zero_stage": 2, "bf16": False, "grad_accum_dtype": "bf16"}, r"\(fp32\) or in fp32"),
    ],
)
def test_sums_that_deepspeed_would_not_take_in_their_dtype_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=f"grad_accum_dtype='....' cannot be honoured with zero_stage=.*{said}"):
        check(StrategyConfig(**given))


def test_overlapped_reductions_give_the_same_steps_and_a_host_says_it_has_none(engine: Ranks, qwen: str) -> None:
    def work(stage: int, overlap: bool) -> Any:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            s = zero({"zero_stage": stage, "overlap_comm": overlap})
        model, optimizer, _ = made(s, qwen)
        s.backward(language_loss(model, share(rows(4, 7), s)), model, optimizer)
        assert s.forget_gradients(model)
        results = run_steps(s, model, optimizer, STEPS[:2])
        texts = [str(each.message) for each in said if "overlap_comm" in str(each.message)]
        return results, weights(s, model), zero_of(model).engine.zero_overlap_comm(), texts

    for stage in (2, 3):
        (plain, expected, off, silent), (results, found, on, texts) = (
            engine.run(work, stage, overlap)[0] for overlap in (False, True)
        )
        assert results == plain and all(torch.equal(found[name], expected[name]) for name in expected)
        assert (off, on) == (False, True) and silent == []
        assert len(texts) == 1 and "no effect on ranks without a GPU" in texts[0]
    with pytest.raises(OptionError, match="overlap_comm=True cannot be honoured with zero_stage=1"):
        check(StrategyConfig(zero_stage=1, overlap_comm=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_use_mp_opt_asks_for_the_half_precision_weights_with_float32_copies_that_bf16_is(
    engine: Ranks, qwen: str, stage: int
) -> None:
    def work(use_mp_opt: bool) -> Any:
        s = zero({"zero_stage": stage, "use_mp_opt": use_mp_opt}, bf16=True, train_batch_size=4)
        model, optimizer, _ = made(s, qwen)
        results = run_steps(s, model, optimizer, [STEPS[0][:1]])
        copies = {flat.dtype for flat in zero_of(model).flats()}
        return results, weights(s, model), {p.dtype for p in model.parameters()}, copies

    (results, found, held, copies), (plain, expected, *_) = (engine.run(work, asked)[0] for asked in (True, False))
    assert (held, copies) == ({torch.bfloat16}, {torch.float32})
    assert results == plain and all(torch.equal(found[name], expected[name]) for name in expected)


def train_in_float16(path: str, folder: str, kind: dict[str, Any]) -> Any:
    s = zero({**kind, "fp16": True}, train_batch_size=4, max_norm=0.5)
    model, optimizer, _ = made(s, path)

    def stepped(factor: float = 1.0, waiting: float = 1.0) -> Any:
        s.backward(language_loss(model, share(STEPS[0][1], s)) * factor, model, optimizer)
        scale_waiting(model, waiting)
        result = s.step_now(optimizer, model)
        return result["grad_norm"], result["skipped"], result["loss_scale"]

    results = run_steps(s, model, optimizer, [STEPS[0][:1]])
    found = {"dtypes": {p.dtype for p in model.parameters()} | {flat.dtype for flat in zero_of(model).flats()}}
    s.save_ckpt(model, folder, "x", optimizer=optimizer)
    found["first"] = weights(s, model)
    found["overflow"], after = stepped(1e4), weights(s, model)
    found["same"] = all(torch.equal(after[name], found["first"][name]) for name in after)
    s.backward(language_loss(model, share(rows(4, 7), s)), model, optimizer)
    s.forget_gradients(model)
    found["good"], found["then"] = stepped(), weights(s, model)
    for name, (factor, waiting) in {"again": (1.0, 1.0), "small": (1e-7, 1.0), "halved": (1.0, 0.5)}.items():
        s.load_ckpt(model, folder, optimizer)
        found[name] = stepped(factor, waiting)
        if name == "again":
            found["now"] = weights(s, model)
    return results, found


@pytest.mark.parametrize(
    "kind",
    [
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"zero_stage": 2, "adam_offload": True, "grad_accum_dtype": "fp32"},
    ],
    ids=["1", "2", "3", "2-offload-fp32"],
)
def test_float16_steps_with_a_scaled_loss_which_an_overflow_halves(
    engine: Ranks, qwen: str, kind: dict[str, Any], tmp_path: Path
) -> None:
    """Defect absent: gradients that vanish in float16, and a step with some that are infinite."""
    expected = train_by_hand(qwen, [STEPS[0][:1]], max_norm=0.5)
    results, found = engine.run(train_in_float16, qwen, str(tmp_path), kind)[0]
    assert found["dtypes"] == {torch.float16, torch.float32}
    assert (
        results[0]["grad_norm"] == pytest.approx(expected["norms"][0], rel=1e-2) and results[0]["loss_scale"] == 2**16
    )
    norm, said, scale = found["overflow"]
    assert norm == math.inf and scale == 2**16 and "the loss scale goes from 65536 to 32768" in said and found["same"]
    norm, said, scale = found["good"]
    assert said is None and scale == 2**15 and found["good"] == found["again"]
    assert all(torch.equal(found["then"][name], found["now"][name]) for name in found["then"])
    assert found["small"][0] == pytest.approx(1e-7 * norm, rel=0.05) and found["halved"][0] == pytest.approx(norm / 2)
