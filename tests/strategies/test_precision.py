"""What a model computes in: by option, else by device; trainer and replica choose alike."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import rlbench as rb
from rlbench.defaults import precision
from rlbench.strategies import FakeStrategy, OptionError, StrategyConfig
from rlbench.strategies.memory.device import RankDevice
from rlbench.workers.replica.config import ReplicaConfig, compute_dtype
from rlbench.workers.train.config import TrainConfig
from tests.modules import qwen_on_meta
from tests.ranks import ranks
from tests.strategies.surface import language_loss, rows

T4, V100, A100, H100, HOST = (7, 5), (7, 0), (8, 0), (9, 0), None


@pytest.mark.parametrize(
    ("gpu", "checkpoint", "asked", "half", "why"),
    [
        (T4, "bfloat16", {}, "float16", "capability 7.5 has no bfloat16"),
        (V100, "float32", {}, "float16", "capability 7.0 has no bfloat16"),
        (A100, "float16", {}, "bfloat16", "capability 8.0 has bfloat16"),
        (H100, "float32", {}, "bfloat16", "capability 9.0"),
        (HOST, "bfloat16", {}, "bfloat16", "the checkpoint"),
        (HOST, "float32", {}, None, "no GPU"),
        (HOST, "float16", {}, None, "no GPU"),
        (HOST, "float32", {"fp16": True}, "float16", "fp16=True"),
        (H100, "bfloat16", {"fp16": True}, "float16", "fp16=True"),
        (HOST, "float32", {"bf16": True}, "bfloat16", "bf16=True"),
        (HOST, "float32", {"in_optimizer": True}, "bfloat16", "use_mp_opt=True"),
        (T4, "bfloat16", {"bf16": False}, None, "bf16=False"),
        (HOST, "float32", {"bf16": False, "in_optimizer": True}, None, "bf16=False"),
    ],
)
def test_the_option_decides_else_the_device(
    gpu: tuple[int, int] | None, checkpoint: str, asked: dict[str, Any], half: str | None, why: str
) -> None:
    chosen = precision(gpu, checkpoint, **asked)
    assert chosen.half == half and why in chosen.why
    assert chosen.dtype("float32") == (half or "float32")


@pytest.mark.parametrize(
    ("asked", "mend"), [({"bf16": True}, "take fp16=True"), ({"in_optimizer": True}, "leave use_mp_opt out")]
)
def test_bfloat16_on_a_gpu_without_is_refused_with_the_mend(asked: dict[str, Any], mend: str) -> None:
    with pytest.raises(OptionError, match=f"capability 7.5 has no bfloat16; {mend}"):
        precision(T4, "float32", **asked)


@pytest.mark.parametrize("gpu", [T4, A100, HOST])
@pytest.mark.parametrize("held", ["float32", "bfloat16", "float16", None])
def test_a_replica_computes_in_what_a_trainer_of_its_checkpoint_does(
    held: str | None, gpu: tuple[int, int] | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "dtype": held}))
    assert compute_dtype(ReplicaConfig(str(tmp_path)), gpu) == precision(gpu, str(held)).dtype("float32")
    assert compute_dtype(ReplicaConfig(str(tmp_path), dtype="float16"), gpu) == "float16"


@pytest.mark.parametrize("door", [rb.Train, TrainConfig, StrategyConfig, StrategyConfig.of])
@pytest.mark.parametrize("other", ["bf16", "use_mp_opt"])
def test_float16_is_not_asked_for_beside_another_half_precision(door: Any, other: str) -> None:
    given = {"fp16": True, other: True}
    with pytest.raises(OptionError, match=rf"{other}=True.*leave"):
        door(given) if door == StrategyConfig.of else door(**given)


def test_float16_takes_weights_held_in_float32() -> None:
    with pytest.raises(OptionError, match=r"masters=False.*leave masters out"):
        rb.Train(fp16=True, masters=False)


def test_fp16_takes_the_place_of_the_default_bf16() -> None:
    script = Namespace(fp16=True, bf16=True)  # as argparse gives them: nobody need have asked for the default
    for given in ({"fp16": True}, StrategyConfig(fp16=True), script):
        made = FakeStrategy(args=given)
        assert (str(made.half), made.bf16, made.config.bf16, made.config.fp16) == ("torch.float16", False, False, True)
    assert str(FakeStrategy().half) == "torch.bfloat16" and FakeStrategy(bf16=False).half is None


def made_on_a_t4(path: str) -> Any:
    """A module whose rank is told, once, that its device is a T4."""

    def make() -> Any:
        real = RankDevice.capability

        def capability(_: RankDevice) -> tuple[int, int]:
            RankDevice.capability = real  # type: ignore[method-assign]
            return T4

        RankDevice.capability = property(capability)  # type: ignore[method-assign, assignment]
        return qwen_on_meta(path)

    return make


def test_a_rank_on_a_t4_starts_in_float16_and_trains_with_a_loss_scale(qwen: str) -> None:
    def step() -> Any:
        s, model = module.strategy, module  # type: ignore[name-defined]
        s.backward(language_loss(model, rows(2)), model)
        return s.step_now(model.optimizer, model)

    with ranks(1) as engine:
        built = engine.build(made_on_a_t4(qwen))[0]
        reason = "a GPU of compute capability 7.5 has no bfloat16"
        assert [tuple(one) for one in built["defaults"]] == [("dtype", built["dtype"], reason)]
        assert built["dtype"] == "float16"
        result = engine.run(step)[0]
        assert result["stepped"] and result["loss_scale"] == 2.0**16


@pytest.mark.parametrize("asked", [{"bf16": True}, {"use_mp_opt": True}])
def test_a_rank_on_a_t4_refuses_bfloat16(qwen: str, asked: dict[str, Any]) -> None:
    with ranks(1, **asked) as engine, pytest.raises(OptionError, match=r"capability 7.5 has no bfloat16"):
        engine.build(made_on_a_t4(qwen))


def test_a_strategy_on_a_t4_says_what_to_take_in_the_place_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankDevice, "capability", property(lambda self: T4))
    with pytest.raises(OptionError, match="take fp16=True"):
        FakeStrategy()
    assert FakeStrategy(args={"fp16": True}).half == torch.float16
