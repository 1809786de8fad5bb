"""Optimizers that a user changes between cells: several as one, groups with rates of their own, and going back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlbench.errors import CheckpointError, EngineError, StateError
from tests.modules import TrainedQwen, qwen_on_meta, save_qwen
from tests.ranks import RankFailure, ranks
from tests.trainers.policy_reference import batch, forward_backward

RATES = (1e-3, 4e-3)


class Inside(torch.optim.Optimizer):
    """Hands its groups to optimizers of its own, as a Muon beside an AdamW is often written."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class Elsewhere(torch.optim.Optimizer):
    """Keeps its momentum where no snapshot looks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.momentum: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])


class Optimizers(TrainedQwen):
    """Makes its optimizer again in another way, as a cell on the ranks would."""

    def on_weights_materialized(self) -> None:
        self.remake("adamw")

    def halves(self) -> tuple[list[Any], list[Any]]:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        return matrices, [p for p in self.parameters() if p.dim() <= 1]

    def remake(self, kind: str) -> None:
        matrices, others = self.halves()
        sgd = torch.optim.SGD(matrices, lr=RATES[0], momentum=0.9)
        adamw = torch.optim.AdamW(others, lr=RATES[1])
        self.optimizer: Any = {
            "adamw": lambda: torch.optim.AdamW(self.parameters(), lr=1e-3),
            "sgd": lambda: torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9),
            "groups": lambda: torch.optim.AdamW(
                [{"params": matrices, "lr": RATES[0]}, {"params": others, "lr": RATES[1]}]
            ),
            "set": lambda: {"matrices": sgd, "others": adamw},
            "inside": lambda: Inside([sgd, adamw]),
            "elsewhere": lambda: Elsewhere(self.parameters()),
            "half": lambda: torch.optim.AdamW(matrices, lr=1e-3),
            "twice": lambda: {"one": sgd, "two": torch.optim.SGD(matrices, lr=1e-3)},
        }[kind]()
        self.second = adamw if kind == "half" else None

    def restore_failing(self) -> None:
        """Let the next restore fail after it has begun."""
        from rlbench.checkpoint import rank_state

        load = rank_state.set_random_state

        def fails(state: Any) -> None:
            rank_state.set_random_state = load
            raise MemoryError("no room")

        rank_state.set_random_state = fails

    def rates(self) -> list[float]:
        held = self.optimizer.values() if isinstance(self.optimizer, dict) else [self.optimizer]
        return [group["lr"] for one in held for group in one.param_groups]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen(tmp_path_factory.mktemp("qwen"), tied=False)


def step(engine: Any, seed: int, **options: Any) -> dict[str, Any]:
    forward_backward(engine, batch(seed))
    return dict(engine.call("policy_optim_step", options)[0])


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_snapshot_of_another_optimizer_is_refused_before_anything_changes(
    qwen: str, tmp_path: Path, world_size: int
) -> None:
    with ranks(world_size, qwen_on_meta(qwen, Optimizers)) as engine:
        step(engine, 0)
        engine.call("write_snapshot", str(tmp_path / "a"))
        metrics, weights = step(engine, 3)["metrics"], engine.call("training_checksums")[0]["weights"]
        engine.method("remake", "groups")
        engine.call("read_snapshot", str(tmp_path / "a"))  # the same settings and state for each parameter
        assert engine.method("rates")[0] == [1e-3, 1e-3]
        assert step(engine, 3)["metrics"] == pytest.approx(metrics, rel=1e-12)  # a norm of groups is summed otherwise
        assert engine.call("training_checksums")[0]["weights"] == weights
        engine.method("remake", "groups")  # with rates of their own, which one group cannot have
        step(engine, 1)
        engine.call("write_snapshot", str(tmp_path / "b"))
        engine.method("remake", "adamw")
        with pytest.raises((CheckpointError, RankFailure), match=r"another optimizer"):
            engine.call("read_snapshot", str(tmp_path / "b"))
        for kind in ("sgd", "set"):
            engine.method("remake", kind)
            step(engine, 1)
            before = engine.call("training_checksums")
            with pytest.raises((CheckpointError, RankFailure), match=r"another optimizer|differ"):
                engine.call("read_snapshot", str(tmp_path / "a"))
            assert engine.call("training_checksums") == before, kind
            step(engine, 2)  # nothing is torn
        engine.method("remake", "adamw")
        engine.call("read_snapshot", str(tmp_path / "a"))


@pytest.mark.parametrize("kind", ["set", "inside"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_part_of_several_optimizers_steps_and_goes_back(
    qwen: str, tmp_path: Path, kind: str, world_size: int
) -> None:
    with ranks(world_size, qwen_on_meta(qwen, Optimizers)) as engine:
        engine.method("remake", kind)
        assert step(engine, 0)["notes"] == []
        before = engine.call("training_checksums")
        engine.call("write_snapshot", str(tmp_path / "a"))
        onward = [step(engine, 1)["metrics"], engine.call("training_checksums")]
        assert engine.call("training_checksums")[0]["optimizer"] != before[0]["optimizer"]
        found = engine.call("read_snapshot", str(tmp_path / "a"))
        assert [own["checksums"] for own in found] == before
        assert [step(engine, 1)["metrics"], engine.call("training_checksums")] == onward


def test_a_step_says_what_it_leaves_out(qwen: str) -> None:
    with ranks(1, qwen_on_meta(qwen, Optimizers)) as engine:
        assert step(engine, 0)["notes"] == []
        engine.method("remake", "elsewhere")
        assert "self.state[parameter]" in " ".join(step(engine, 1)["notes"])
        engine.method("remake", "half")
        assert "module.second" in " ".join(step(engine, 2)["notes"])
        engine.method("remake", "twice")
        engine.call("policy_zero_grad")
        forward_backward(engine, batch(3))
        with pytest.raises(EngineError, match="same parameter"):
            engine.call("policy_optim_step", {})


def test_a_rate_is_of_one_step_or_for_good_and_groups_keep_their_ratio(qwen: str) -> None:
    with ranks(1, qwen_on_meta(qwen, Optimizers)) as engine:
        for kind in ("groups", "set"):
            engine.method("remake", kind)
            assert step(engine, 0, lr=RATES[0] / 10)["metrics"]["lr"] == pytest.approx(RATES[0] / 10)
            assert engine.method("rates")[0] == list(RATES), "of that step alone"
            assert step(engine, 1)["metrics"]["lr"] == RATES[0]
            engine.call("set_lr", RATES[0] / 10)
            assert engine.method("rates")[0] == pytest.approx([rate / 10 for rate in RATES])
            with pytest.raises(EngineError, match="ratio"):
                engine.call("set_lr", 0.0)
        engine.method("remake", "groups")
        weights = engine.call("state_checksum")
        assert step(engine, 2, lr=0.0)["stepped"]
        assert engine.call("state_checksum") == weights and engine.method("rates")[0] == list(RATES)


def test_a_scheduler_goes_on_as_if_a_step_had_had_its_usual_rate(qwen: str) -> None:
    def scheduled() -> None:
        module.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(module.optimizer, 0.5)  # type: ignore[name-defined]

    with ranks(1, qwen_on_meta(qwen, Optimizers)) as engine:
        engine.run(scheduled)
        used = [step(engine, seed, **options)["metrics"]["lr"] for seed, options in enumerate([{}, {"lr": 7e-3}, {}])]
        assert used == pytest.approx([1e-3, 7e-3, 2.5e-4])


def test_a_policy_that_a_restore_tore_is_used_for_nothing_until_it_is_whole(qwen: str, tmp_path: Path) -> None:
    with ranks(1, qwen_on_meta(qwen, Optimizers)) as engine:
        step(engine, 0)
        before = engine.call("training_checksums")
        engine.call("write_snapshot", str(tmp_path / "a"))
        step(engine, 1)
        engine.method("restore_failing")
        with pytest.raises(CheckpointError, match="torn"):
            engine.call("read_snapshot", str(tmp_path / "a"))
        assert engine.call("status")[0]["weights"] == "torn"
        for verb, args in (
            ("policy_optim_step", ({},)),
            ("write_snapshot", (str(tmp_path / "b"),)),
            ("stage_weights", ({},)),
            ("call_method", ("rates", (), {})),
        ):
            with pytest.raises(StateError, match="torn"):
                engine.call(verb, *args)
        assert [own["checksums"] for own in engine.call("read_snapshot", str(tmp_path / "a"))] == before
        step(engine, 1)
