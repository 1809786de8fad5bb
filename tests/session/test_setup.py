"""Another optimizer, a schedule, frozen parameters: they train as told, go back with the session, and outlive ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rlbench as rb
from rlbench.errors import EngineError, SessionError, StateError
from rlbench.options import OptionError
from rlbench.tiny import tasks

pytestmark = pytest.mark.engine
EDGES = re.compile(r"norm|embed")


def batch_of(session: Any) -> Any:
    rollouts = session.rollout(tasks.prompts(6, seed=3), n=4, max_tokens=10, progress=False)
    return rollouts.score([i % 2 for i in range(rollouts.samples)]).batch(advantage=rb.rl.group_normalized())


@pytest.fixture(scope="module")
def session(cluster: Any) -> Iterator[Any]:
    """A session of two ranks."""
    small = {"max_model_len": 64, "kv_cache_bytes": 1 << 26}
    with rb.Session("tiny", train=rb.Train(lr=1e-4, shards=2, max_norm=0.0), inference=small, undo=3) as made:
        yield made


@pytest.fixture(scope="module")
def batch(session: Any) -> Any:
    return batch_of(session)


@pytest.fixture
def put_back(session: Any) -> Iterator[None]:
    kept = session.snapshot()
    yield
    session.zero_grad()
    session.restore(kept)
    session.drop(kept)


def sums(session: Any) -> Any:
    return session.train.call_all("training_checksums").result()


def step(session: Any, batch: Any) -> tuple[Any, ...]:
    metrics = session.train_step(batch)
    return metrics.loss, metrics.grad_norm, metrics.lr, sums(session)


def kinds() -> list[str]:
    held = module.optimizer  # type: ignore[name-defined]
    return [type(one).__name__ for one in (held.values() if isinstance(held, dict) else [held])]


def weights() -> dict[str, Any]:
    whole = lambda p: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()  # noqa: E731
    return {name: whole(parameter) for name, parameter in module.named_parameters()}  # type: ignore[name-defined]


def gradients_now() -> dict[str, Any]:
    return {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}  # type: ignore[name-defined]


def two_parts(module: Any, lr: float) -> Any:
    import torch

    first, *rest = module.parameters()
    return {"first": torch.optim.SGD([first], lr=lr), "rest": torch.optim.RMSprop(rest, lr=lr / 10)}


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        ("sgd", {"lr": 0.1, "momentum": 0.9}, ["SGD"]),
        ("muon", {"lr": 1e-3}, ["Muon", "AdamW"]),
        (two_parts, {"lr": 0.01}, ["SGD", "RMSprop"]),
    ],
    ids=["by name", "muon", "a function"],
)
def test_another_optimizer_steps_and_undo_brings_back_each_with_its_state(
    session: Any, batch: Any, put_back: Any, given: Any, options: Any, expected: list[str]
) -> None:
    before = sums(session)
    first = step(session, batch)
    session.optimizer(given, **options)
    assert session.train.run(kinds)[0] == expected == session.train.info["optimizer"]
    begun = sums(session)
    second, third = step(session, batch), step(session, batch)
    assert second[-1][0]["weights"] != begun[0]["weights"] and second[2] == options["lr"]
    session.undo(sync=False)
    assert step(session, batch) == third, "momentum and all"
    session.undo(sync=False)
    session.undo(sync=False)
    assert sums(session) == begun and session.train.run(kinds)[0] == expected
    session.undo(sync=False)
    assert sums(session) == before and session.train.run(kinds)[0] == ["AdamW"] == session.train.info["optimizer"]
    assert step(session, batch) == first


def test_a_step_of_sgd_is_the_gradient_times_the_rate(session: Any, batch: Any, put_back: Any) -> None:
    session.optimizer("sgd", lr=0.5)
    before = session.train.run(weights)[0]
    session.forward_backward(batch)
    gradients = session.train.run(gradients_now)[0]
    session.optim_step()
    after = session.train.run(weights)[0]
    for name, gradient in gradients.items():
        assert (before[name] - 0.5 * gradient - after[name]).abs().max() < 1e-6, name


def test_a_schedule_is_followed_goes_back_and_ends(session: Any, batch: Any, put_back: Any) -> None:
    rate = session.lr
    session.schedule(lambda step: 1 / (step + 1))
    rates = [step(session, batch)[2] for _ in range(3)]
    assert rates == pytest.approx([rate, rate / 2, rate / 3])
    session.undo(sync=False)
    session.undo(sync=False)
    assert step(session, batch)[2] == pytest.approx(rate / 2)
    session.schedule("linear", steps=4)
    assert [step(session, batch)[2] for _ in range(3)] == pytest.approx([rate, 0.75 * rate, 0.5 * rate])
    session.schedule(None)
    assert step(session, batch)[2] == pytest.approx(rate)


def test_what_is_frozen_stays_and_trains_again_and_that_goes_back(session: Any, batch: Any, put_back: Any) -> None:
    first = session.train.run(weights)[0]
    frozen = session.freeze("model.layers.0", EDGES)
    trained = session.train.info["trainable"]
    assert {name for name in first if name.startswith("model.layers.0.") or EDGES.search(name)} == set(frozen)
    assert trained < session.train.info["parameters"]
    session.train_step(batch)
    second = session.train.run(weights)[0]
    assert {name for name in first if bool((first[name] == second[name]).all())} == set(frozen)
    assert session.sync_weights().gap < 1e-4
    assert session.unfreeze(EDGES) == [name for name in frozen if not EDGES.search(name)]
    session.train_step(batch)
    third = session.train.run(weights)[0]
    still = {name for name in first if bool((second[name] == third[name]).all())}
    assert still == {name for name in frozen if not EDGES.search(name)}
    session.undo(sync=False)
    assert session.train.info["trainable"] > trained
    session.undo(sync=False)
    assert session.train.info["trainable"] == trained, "as it was at that step"
    assert session.unfreeze() == [] and session.train.info["trainable"] == session.train.info["parameters"]


def of_others(module: Any) -> Any:
    import torch

    return torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=1.0)


def of_some(module: Any) -> Any:
    import torch

    return torch.optim.SGD(list(module.parameters())[:2], lr=1.0)


REFUSED: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda s: s.optimizer("muoon"), OptionError, "muon"),
    (lambda s: s.optimizer("sgd", momentumm=0.9), TypeError, "momentumm"),
    (lambda s: s.optimizer(3), OptionError, "int"),
    (lambda s: s.optimizer("adamw8bit"), EngineError, "split over ranks"),
    (lambda s: s.optimizer(lambda module: None), EngineError, "NoneType"),
    (lambda s: s.optimizer(of_others), EngineError, "no parameters of the module"),
    (lambda s: s.optimizer(of_some), EngineError, "in no group"),
    (lambda s: s.optimizer(lambda module: 1 / 0), rb.RLBenchError, "ZeroDivisionError"),
    (lambda s: s.optimizer(lambda module, x=bytes(2 << 20): None), OptionError, "MiB"),
    (lambda s: s.schedule("cosin", steps=3), OptionError, "cosine"),
    (lambda s: s.schedule(lambda optimizer: optimizer), EngineError, "scheduler"),
    (lambda s: s.schedule(lambda step: 1 / 0), rb.RLBenchError, "ZeroDivisionError"),
    (lambda s: s.freeze(), SessionError, "which parameters"),
    (lambda s: s.freeze("model.layer.0"), EngineError, "model.layers"),
    (lambda s: s.freeze("*"), EngineError, "nothing would train"),
]


def test_what_cannot_be_is_refused_and_nothing_changes(session: Any, put_back: Any) -> None:
    before = sums(session)
    for change, error, token in REFUSED:
        with pytest.raises(error, match=re.escape(token)):
            change(session)
        assert sums(session) == before and session.core.link.state("setup")["setup"] == {}, token
        assert all(session.train.run(all_trains)) and session.train.run(kinds)[0] == ["AdamW"], token


def all_trains() -> bool:
    return all(p.requires_grad for p in module.parameters())  # type: ignore[name-defined]


def version_shown(session: Any) -> set[int]:
    return set(session.inference.weight_versions())


def test_frozen_layers_do_not_travel_and_undo_heal_and_other_replicas_find_all_weights(
    session: Any, batch: Any, put_back: Any
) -> None:
    frozen = len(session.freeze("model.layers.0", "model.embed_tokens"))
    session.sync_weights()
    whole = session.train_step(batch, lr=1e-2) and session.sync_weights()
    assert whole.unchanged == frozen and whole.gap <= 1e-4
    session.train_step(batch)
    session.undo()
    back = session.sync_weights()
    assert back.unchanged == frozen and back.gap <= 1e-4, "undo touches nothing that is frozen"
    session.restore(session.snapshot())
    assert session.sync_weights().gap <= 1e-4

    session.train_step(batch)
    last, held = session.sync_weights(), session.train.call_all("state_checksum").result()
    assert last.unchanged == frozen
    os.kill(session.train.run(os.getpid)[1], signal.SIGKILL)
    with pytest.raises(rb.RLBenchError):
        session.train_step(batch)
    session.heal(prefer="weights")
    assert session.train.call_all("state_checksum").result() == held, "shared memory has what did not travel too"
    session.train_step(batch, lr=1e-2)
    again = session.sync_weights()
    assert again.unchanged == frozen and again.gap <= 1e-4, "heal sent all"

    session.resize(inference=2)
    more = session.sync_weights()
    assert version_shown(session) == {more.version} and more.gap <= 1e-4
    session.resize(inference=1)
    assert session.sync_weights().gap <= 1e-4
    session.unfreeze()
    assert session.sync_weights().unchanged == 0


def test_gradients_that_wait_are_not_taken_over_and_a_trainer_goes_with_its_optimizer(
    session: Any, batch: Any, put_back: Any
) -> None:
    session.forward_backward(batch)
    with pytest.raises(StateError, match="gradients wait"):
        session.freeze("model.layers.0")
    session.zero_grad()
    trainer = session.trainer("grpo", tasks.prompts(8), tasks.reward, rollout_batch_size=4, n=2, max_tokens=8)
    session.freeze("model.layers.0")
    assert session.last_trainer is trainer, "its optimizer is there"
    with pytest.warns(UserWarning, match="gone with it"):
        session.optimizer("sgd", lr=0.1)
    with pytest.raises(SessionError, match="no trainer"):
        trainer.step()
    session.train_step(batch)


def held_bits() -> set[str]:
    return {str(state["state1"].dtype) for state in module.optimizer.state.values()}  # type: ignore[name-defined]


def moments_of_8_bits_go_back(session: Any, batch: Any) -> None:
    """On one rank, where bitsandbytes' AdamW can hold whole tensors."""
    session.schedule(None)
    session.optimizer("adamw8bit", lr=1e-3)
    step(session, batch)
    assert session.train.run(held_bits)[0] == {"torch.uint8", "torch.float32"}, "small tensors stay"
    then = step(session, batch)
    session.undo(sync=False)
    assert step(session, batch) == then


def test_all_of_it_outlives_a_killed_rank_a_checkpoint_another_size_and_the_session(
    session: Any, tmp_path: Path
) -> None:
    batch = batch_of(session)
    batch = batch.replace(old_logprobs=batch.sampler_logprobs)  # other sessions do not know this one's
    session.optimizer("muon", lr=1e-3, momentum=0.9)
    session.schedule("cosine", steps=10, warmup=2)
    session.freeze("model.embed_tokens")
    session.train_step(batch)
    kept, here = session.snapshot("here"), sums(session)
    expected = step(session, batch)
    session.restore(kept, sync=False)
    os.kill(session.train.run(os.getpid)[1], signal.SIGKILL)
    with pytest.raises(rb.RLBenchError):
        session.train_step(batch)
    session.heal()
    assert sums(session) == here and step(session, batch) == expected
    session.restore(kept, sync=False)
    session.save(tmp_path)
    with rb.Session.load(tmp_path, train={"shards": 1}, undo=0) as one:
        assert (
            one.train.run(kinds)[0] == ["Muon", "AdamW"]
            and one.train.info["trainable"] == session.train.info["trainable"]
        )
        assert step(one, batch)[:3] == pytest.approx(expected[:3], rel=1e-4, abs=1e-6)
    session.resize(train=1)
    assert session.train.run(kinds)[0] == ["Muon", "AdamW"]
    assert step(session, batch)[:3] == pytest.approx(expected[:3], rel=1e-4, abs=1e-6)
    moments_of_8_bits_go_back(session, batch)
    session.restore(kept, sync=False)
    session.resize(train=2)
    session.restore(kept)
    name = session.name
    session.park()
    again = rb.attach(name)
    session.core = again.core
    assert step(again, batch) == expected
    again.restore("here")
    assert step(again, batch) == expected
    again.optimizer(None)
    again.unfreeze()
    assert again.train.run(kinds)[0] == ["AdamW"] and again.core.link.state("setup")["setup"] == {}


def test_a_step_without_a_signal_is_said_and_can_be_left_out(session: Any, batch: Any, put_back: None) -> None:
    silent = batch.replace(advantages=batch.advantages * 0)
    with pytest.raises(OptionError, match="no_signal"):
        session.train_step(silent, no_signal="stop")
    assert session.train_step(batch).no_signal < 1
    before, version = sums(session), session.version
    skipped = session.train_step(silent, no_signal="skip")
    assert skipped.no_signal == 1 and skipped.skipped and sums(session) == before and session.version == version
    assert "no signal" in repr(skipped) and session.history[-1]["no_signal"] == 1
    stepped = session.train_step(silent)  # by AdamW's moments alone
    assert stepped.no_signal == 1 and not stepped.skipped and sums(session) != before
    assert session.train_step(silent, loss=lambda inputs: (-inputs.logprobs, {})).no_signal is None
