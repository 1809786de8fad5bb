"""A reference that follows the policy: copied, averaged, back with undo, and kept through death, parking and disk."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlbench as rb
from rlbench.errors import SessionError
from rlbench.options import OptionError
from rlbench.tiny import tasks

pytestmark = pytest.mark.engine
SMALL = {"max_model_len": 64, "kv_cache_bytes": 1 << 26}


@pytest.fixture(scope="module")
def session(cluster: Any) -> Iterator[Any]:
    with rb.Session("tiny", train=said(), inference=SMALL, reference=True, undo=2) as made:
        yield made


def halved(step: int) -> float:
    return 0.5**step


def said(**options: Any) -> rb.Train:
    return rb.Train(lr=1e-3, optimizer={"name": "sgd", "momentum": 0.9}, schedule=halved, **options)


@pytest.fixture(scope="module")
def batch(session: Any) -> Any:
    rollouts = session.rollout(tasks.prompts(6, seed=3), n=4, max_tokens=10, progress=False)
    return rollouts.score([i % 2 for i in range(rollouts.samples)]).batch(advantage=rb.rl.group_normalized())


def weights(engine: Any) -> Any:
    import torch

    return torch.cat([tensor.double().flatten() for _, tensor in sorted(engine.state_dict().items())])


def kl(session: Any, batch: Any) -> float:
    """Of the policy of now to the reference; nothing changes."""
    metrics = session.forward_backward(batch, loss=rb.rl.grpo(kl_coef=0.1))
    session.zero_grad()
    return float(metrics.ref_kl)


def test_it_is_the_policy_or_an_average_and_undo_takes_it_along(session: Any, batch: Any) -> None:
    first = weights(session.reference)
    assert session.train.info["optimizer"] == ["SGD"]
    assert session.train_step(batch).lr == 1e-3 and session.lr == pytest.approx(5e-4), "as rb.Train says"
    second = weights(session.train)
    assert kl(session, batch) > 0
    session.update_reference()
    assert (weights(session.reference) == second).all() and kl(session, batch) == 0
    session.train_step(batch)
    session.update_reference(keep=0.75)
    average = 0.75 * second + 0.25 * weights(session.train)
    assert (weights(session.reference) - average).abs().max() < 1e-7
    session.undo()
    assert (weights(session.reference) == second).all()
    session.undo()
    assert (weights(session.reference) == first).all() and kl(session, batch) == 0
    assert session.train_step(batch).lr == 1e-3, "the schedule goes back with it"
    session.undo()


def test_another_setup_is_put_back_and_the_cell_that_made_it_may_run_again(session: Any) -> None:
    session.schedule(None)
    session.optimizer("adamw")
    assert session.train.info["optimizer"] == ["AdamW"]
    session.optimizer(None)
    assert session.train.info["optimizer"] == ["SGD"]
    session.schedule(halved)
    again = rb.Session("tiny", session.name, train=said(), inference=SMALL, reference=True, undo=2)
    session.core = again.core
    with pytest.raises(SessionError, match="schedule"):
        rb.Session("tiny", session.name, train=rb.Train(lr=1e-3), inference=SMALL, reference=True, undo=2)


def test_it_outlives_its_process_the_session_and_a_checkpoint(session: Any, batch: Any, tmp_path: Path) -> None:
    session.train_step(batch)
    session.update_reference()
    moved = weights(session.reference)
    early = session.snapshot("moved")
    session.train_step(batch)
    session.update_reference(keep=0.5)
    late = weights(session.reference)
    os.kill(session.reference.run(os.getpid)[0], signal.SIGKILL)
    with pytest.raises(rb.RLBenchError):
        kl(session, batch)
    session.heal()
    assert (weights(session.reference) == late).all()
    session.save(tmp_path)
    with pytest.raises(SessionError, match="checkpoint has its optimizer"):
        rb.Session.load(tmp_path, train={"optimizer": "muon"})
    with rb.Session.load(tmp_path, undo=2, train={"reference": rb.EMA(0.5, every=2)}) as other:
        assert (weights(other.reference) == late).all() and (weights(other.train) == weights(session.train)).all()
        assert other.train.info["optimizer"] == ["SGD"]
        it_follows_by_itself(other, batch)
    name = session.name
    session.park()
    again = rb.attach(name)
    session.core = again.core
    assert (weights(again.reference) == late).all()
    again.restore(early.label)
    assert (weights(again.reference) == moved).all()


def it_follows_by_itself(session: Any, batch: Any) -> None:
    """Every second step an average; each undo, a kill and a restore bring back the bits."""
    first = weights(session.reference)
    if session.step % 2:
        session.train_step(batch)
        first = first / 2 + weights(session.train) / 2
    kept = session.snapshot()
    session.train_step(batch)
    assert (weights(session.reference) - first).abs().max() < 1e-7
    before = weights(session.reference)
    session.train_step(batch)
    moved = weights(session.reference)
    assert (moved - (before / 2 + weights(session.train) / 2)).abs().max() < 1e-7
    session.undo()
    assert (weights(session.reference) == before).all()
    session.train_step(batch)
    assert (weights(session.reference) == moved).all()
    os.kill(session.reference.run(os.getpid)[0], signal.SIGKILL)
    with pytest.raises(rb.RLBenchError):
        kl(session, batch)
    session.heal()
    assert (weights(session.reference) == moved).all()
    session.restore(kept)
    session.train_step(batch)
    session.forward_backward(batch)
    session.optim_step()
    assert (weights(session.reference) == moved).all()
    with pytest.raises(rb.RLBenchError, match="update_reference"):
        session.trainer("grpo", tasks.prompts(8), tasks.reward, rollout_batch_size=4, n=2, max_tokens=8)


def test_a_step_counts_where_the_reference_cannot_follow(session: Any, batch: Any) -> None:
    """Its own rank is dead by then."""
    options = session.core.options
    session.core.options = dataclasses.replace(options, train=said(reference=rb.every(1)))
    step, first = session.step, weights(session.reference)
    try:
        os.kill(session.reference.run(os.getpid)[0], signal.SIGKILL)
        with pytest.raises(rb.RLBenchError):
            session.train_step(batch)
        assert session.step == step + 1 == session.history[-1]["step"]
        session.heal()
        assert (weights(session.reference) == first).all()
        session.train_step(batch)
        assert (weights(session.reference) == weights(session.train)).all()
    finally:
        session.core.options = options


def test_it_is_refused_where_there_is_none_to_move(session: Any) -> None:
    with pytest.raises(OptionError, match="keep=1"):
        session.update_reference(keep=1)
    here, session.core.engines = (
        session.core.engines,
        {name: engine for name, engine in session.core.engines.items() if name != "reference"},
    )
    try:
        with pytest.raises(SessionError, match="no reference"):
            session.update_reference()
    finally:
        session.core.engines = here
