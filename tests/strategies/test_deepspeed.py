"""DeepspeedStrategy on two ranks: numbers of one process, checkpoints to the bit, and what goes between strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from rlbench.checkpoint.rank_state import loss_states_of
from rlbench.errors import EngineError
from rlbench.strategies import FSDPV2Strategy
from rlbench.strategies.options.config import OptionError
from tests.ranks import Ranks
from tests.strategies.surface import (
    assert_close,
    failing_as,
    language_loss,
    rows,
    run_steps,
    share,
    train_by_hand,
    whole,
)
from tests.trainers.test_trainer_on_ranks import trainer_on

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make env")
pytestmark = pytest.mark.slow

STEPS = [[rows(4, 0), rows(4, 1)], [rows(4, 2), rows(4, 3)], [rows(4, 4), rows(4, 5)]]
KINDS: list[dict[str, Any]] = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 1, "adam_offload": True},
    {"zero_stage": 2, "adam_offload": True},
    {"zero_stage": 3, "fsdp_cpu_offload": True},
]


def zero(kind: dict[str, Any], **own: Any) -> Any:
    from rlbench.strategies import DeepspeedStrategy

    return DeepspeedStrategy(**{"bf16": False, "train_batch_size": 8, "micro_train_batch_size": 2, **own}, args=kind)


def weights(s: Any, model: Any) -> dict[str, torch.Tensor]:
    """The model's parameters as a checkpoint has them, on rank 0."""
    return {
        n.removeprefix("parameter/"): t for n, t in s.state_of(model).tensors().items() if n.startswith("parameter/")
    }


@pytest.fixture(scope="module")
def by_hand(qwen: str) -> dict[str, Any]:
    """The steps in one process with torch alone."""
    return train_by_hand(qwen, STEPS, max_norm=0.5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_steps_are_those_of_one_process(
    engine: Ranks, qwen: str, by_hand: dict[str, Any], kind: dict[str, Any]
) -> None:
    def work() -> Any:
        s = zero(kind, max_norm=0.5)
        model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), is_training=True)
        optimizer = s.create_optimizer(model, lr=1e-2, weight_decay=0.1)
        results = run_steps(s, model, optimizer, STEPS)
        return results, weights(s, model)

    (results, found), (others, nothing) = engine.run(work)
    assert [r["stepped"] for r in results] == [False, True] * 3
    assert [r["grad_norm"] for r in results if r["stepped"]] == pytest.approx(by_hand["norms"], abs=1e-5)
    assert results == others and not nothing
    assert_close(found, by_hand["parameters"])


def made(s: Any, path: str, **own: Any) -> tuple[Any, Any, Any]:
    from rlbench.strategies.optim.optimizer_set import cosine_schedule

    model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(path), is_training=True)
    optimizer = s.create_optimizer(model, lr=1e-2, weight_decay=0.1)
    return model, optimizer, cosine_schedule(optimizer, 10, 0.2)


OWN = {"max_norm": 0.5, "train_batch_size": 4}
SINGLE = [step[:1] for step in STEPS]


@dataclass(frozen=True)
class Trained:
    """Three steps of a kind on rank 0, and the folder of the checkpoint after the second."""

    folder: str
    results: list[Any]
    weights: dict[str, torch.Tensor]
    lr: float


@pytest.fixture(scope="module")
def trained(engine: Ranks, qwen: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Of a kind and a dtype: trained once, undisturbed."""
    found: dict[str, Trained] = {}

    def train_and_save(kind: dict[str, Any], bf16: bool, folder: str) -> Trained:
        s = zero(kind, **OWN, bf16=bf16)
        model, optimizer, scheduler = made(s, qwen)
        results = run_steps(s, model, optimizer, SINGLE[:2], scheduler)
        loss_states_of(model)["scaled"] = {"mean": torch.tensor(0.25)}
        s.save_ckpt(model, folder, "two", client_state={"at": 2}, optimizer=optimizer, scheduler=scheduler)
        results += run_steps(s, model, optimizer, SINGLE[2:], scheduler)
        return Trained(folder, results, weights(s, model), optimizer.param_groups[0]["lr"])

    def of(kind: dict[str, Any], bf16: bool = False) -> Trained:
        name = f"{kind}, bf16={bf16}"
        if name not in found:
            found[name] = engine.run(train_and_save, kind, bf16, str(tmp_path_factory.mktemp("trained")))[0]
        return found[name]

    return of


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_a_run_goes_on_from_a_checkpoint_to_the_bit(
    engine: Ranks, qwen: str, trained: Callable[..., Trained], kind: dict[str, Any], bf16: bool
) -> None:
    then = trained(kind, bf16)

    def load_and_train() -> Any:
        s = zero(kind, **OWN, bf16=bf16)
        model, optimizer, scheduler = made(s, qwen)
        run_steps(s, model, optimizer, [[rows(4, 9)]], scheduler)  # another state, to be replaced
        s.backward(language_loss(model, share(rows(4, 8), s)), model, optimizer)  # must not be stepped with
        _, client = s.load_ckpt(model, then.folder, optimizer, scheduler)
        assert float(loss_states_of(model)["scaled"]["mean"]) == 0.25
        results = run_steps(s, model, optimizer, SINGLE[2:], scheduler)
        return weights(s, model), results, optimizer.param_groups[0]["lr"], client

    now, again, rate, client = engine.run(load_and_train)[0]
    assert (again, rate, client) == (then.results[2:], then.lr, {"at": 2})
    for name, tensor in then.weights.items():
        assert torch.equal(now[name], tensor), name


def test_a_checkpoint_goes_over_to_fsdp2_and_back(engine: Ranks, qwen: str, tmp_path: Path) -> None:
    def run(stage: int, source: str, target: str, steps: Any) -> Any:
        own = {"bf16": False, "train_batch_size": 8, "micro_train_batch_size": 2, "max_norm": 0.5}
        s = zero({"zero_stage": stage}, max_norm=0.5) if stage else FSDPV2Strategy(**own)
        model, optimizer, scheduler = made(s, qwen)
        if source:
            s.load_ckpt(model, source, optimizer, scheduler)
        run_steps(s, model, optimizer, steps, scheduler)
        if target:
            s.save_ckpt(model, target, "x", optimizer=optimizer, scheduler=scheduler)
        return weights(s, model) if stage else whole(dict(model.named_parameters()))

    expected = engine.run(run, 0, "", "", STEPS)[0]
    for stage in (1, 2, 3):
        first, second, third = (str(tmp_path / f"{stage}-{name}") for name in "abc")
        engine.run(run, stage, "", first, STEPS[:1])
        engine.run(run, 0, first, second, STEPS[1:2])
        with failing_as(f"stage {stage}"):
            assert_close(engine.run(run, stage, second, third, STEPS[2:])[0], expected)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_gradients_that_are_forgotten_or_not_finite_leave_nothing(
    engine: Ranks, qwen: str, trained: Callable[..., Trained], kind: dict[str, Any]
) -> None:
    def work() -> Any:
        s = zero(kind, **OWN)
        model, optimizer, scheduler = made(s, qwen)
        results = run_steps(s, model, optimizer, SINGLE[:1], scheduler)
        before = weights(s, model)
        loss = language_loss(model, share(rows(4, 7), s))
        s.backward(loss, model, optimizer)
        assert s.forget_gradients(model) and not s.forget_gradients(model)
        s.backward(language_loss(model, share(rows(4, 7), s)) * float("inf"), model, optimizer)
        skipped = s.step_now(optimizer, model)
        assert not skipped["stepped"] and "not" not in str(skipped["grad_norm"]) and skipped["skipped"]
        after = weights(s, model)
        assert all(torch.equal(after[name], before[name]) for name in before)
        return results + run_steps(s, model, optimizer, SINGLE[1:], scheduler), weights(s, model)

    plain, (results, found) = trained(kind), engine.run(work)[0]
    assert results == plain.results
    assert all(torch.equal(found[name], plain.weights[name]) for name in plain.weights)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_saved_folder_is_the_model_and_an_average_follows(
    engine: Ranks, qwen: str, stage: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "hf")

    def work() -> Any:
        s = zero({"zero_stage": stage}, train_batch_size=4)
        model, optimizer, _ = made(s, qwen)
        average = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), is_training=True)
        frozen = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen))
        run_steps(s, model, optimizer, [STEPS[0][:1]])
        s.moving_average(model, average, beta=0.75)
        s.save_model(model, None, folder)
        with torch.no_grad():
            logits = model(torch.tensor(rows(2, 3))).logits
            first = frozen(torch.tensor(rows(2, 3))).logits
        return weights(s, model), dict(average.named_parameters()), logits, first

    found, average, logits, first = engine.run(work)[0]
    saved, before = AutoModelForCausalLM.from_pretrained(folder), Qwen2ForCausalLM.from_pretrained(qwen)
    assert_close(dict(saved.named_parameters()), found, atol=0)
    expected = {name: 0.75 * p.detach() + 0.25 * found[name] for name, p in before.named_parameters()}
    assert_close(average, expected, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(logits, saved(torch.tensor(rows(2, 3))).logits)
        torch.testing.assert_close(first, before(torch.tensor(rows(2, 3))).logits)


def test_what_deepspeed_cannot_honour_is_refused_before_anything(engine: Ranks, qwen: str) -> None:
    others: list[dict[str, Any]] = [{"tensor_parallel": 2}, {"zero_stage": 4}]
    for given in [*others, {"zero_stage": 2, "fsdp_cpu_offload": True}]:
        with pytest.raises(OptionError, match=next(name for name in given if name != "zero_stage" or len(given) == 1)):
            engine.run(lambda given=given: zero(given, bf16=True))
    with pytest.raises(OptionError, match=r"use_mp_opt=True cannot be honoured .* bf16=False"):
        engine.run(lambda: zero({"use_mp_opt": True, "bf16": False}))

    def backward_without_optimizer() -> None:
        s = zero({})
        model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), is_training=True)
        s.backward(language_loss(model, rows(1)), model)

    with pytest.raises(EngineError, match="create_optimizer"):
        engine.run(backward_without_optimizer)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_holds_what_its_stage_leaves_it(engine: Ranks, qwen: str, stage: int) -> None:
    def work() -> Any:
        s = zero({"zero_stage": stage}, train_batch_size=4)
        plain = Qwen2ForCausalLM.from_pretrained(qwen)
        model, optimizer = s.prepare((plain, torch.optim.AdamW(plain.parameters())))
        s.backward(language_loss(model, share(rows(4, 1), s)), model, optimizer)
        gradients = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
        s.step_now(optimizer, model)
        s.forget_gradients(model)  # and what is gathered
        state = sum(value.numel() for held in optimizer.state.values() for value in held.values())
        return sum(p.numel() for p in model.parameters()), gradients, state

    total = sum(p.numel() for p in Qwen2ForCausalLM.from_pretrained(qwen).parameters())
    for parameters, gradients, state in engine.run(work):
        assert parameters == (0 if stage == 3 else total)
        assert gradients == (total if stage == 1 else 0)
        assert 2 * total // 2 <= state < 1.1 * total, "two moments, over two ranks"


def test_a_trainer_takes_the_steps_it_takes_with_fsdp2(engine: Ranks, qwen: str) -> None:
    """A step is over the sequences of two iterations: gradients of the first are scaled when the second joins."""

    def train(name: str, options: dict[str, Any]) -> Any:
        trainer = trainer_on(qwen, strategy=name, options={**options, "train_batch_size": 32, "max_norm": 0.5})
        found: list[Any] = []
        for _ in range(4):
            trainer.make_experience()
            metrics = trainer.ppo_train()
            found.append({key: metrics[key] for key in ("policy_loss", "optimizer_steps", "reward") if key in metrics})
        state = trainer.strategy.state_of(trainer.actor).tensors()
        return found, whole({name: t for name, t in state.items() if name.startswith("parameter/")})

    expected, parameters = engine.run(train, "FSDPV2Strategy", {})[0]
    assert expected[-1]["optimizer_steps"] == 2
    kinds: list[dict[str, Any]] = [{"zero_stage": 2, "adam_offload": True}, {"zero_stage": 3}]
    for kind in [*kinds, {"zero_stage": 2, "sequence_parallel": 2}]:
        with failing_as(str(kind)):
            found, own = engine.run(train, "DeepspeedStrategy", kind)[0]
            assert [pytest.approx(one, abs=1e-5, nan_ok=True) for one in expected] == found
            assert_close(own, parameters)
