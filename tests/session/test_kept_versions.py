"""Draws under the weights of a kept version: a snapshot's own, while trainer and replicas stay as they were."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.dispatch.link import shm_prefix
from rlbench.errors import CheckpointError, SessionError, Stopped
from rlbench.tiny import tasks
from tests.clock import interrupt_once
from tests.session.looking import generates

pytestmark = pytest.mark.engine

PROMPTS = tasks.prompts(3, seed=1)
HOW: dict[str, Any] = {"n": 4, "max_tokens": 8, "ignore_eos": True, "progress": False, "seed": 7, "temperature": 2.0}
SEQUENCE = [[(7 * k) % 200 for k in range(24)]]


def reward(rollout: Any) -> float:
    return float(len(set(rollout.token_ids)) + rollout.text.count("1"))


@pytest.fixture(scope="module")
def first(session: Any) -> Iterator[Any]:
    """What the session drew at a snapshot "first"; it is two steps further now, and synced."""
    session.sync_weights()
    kept = session.snapshot("first")
    drawn = session.rollout(PROMPTS, **HOW).score(reward)
    for _ in range(2):
        session.train_step(drawn.batch(advantage=rb.rl.group_normalized()), lr=5e-2)
    session.sync_weights()
    yield drawn
    session.drop(kept)


def standing(session: Any) -> tuple[Any, ...]:
    """What must not change: checksums of the ranks, versions, what the replicas compute, what lies in shared memory."""
    return (
        session.train.call_all("training_checksums").result(),
        session.version,
        session.inference.weight_versions(),
        [row.tolist() for row in session.inference.logprobs(SEQUENCE)],
        sorted(path.name for path in Path("/dev/shm").glob(f"{shm_prefix(session.name)}kept-*")),
    )


def test_what_is_drawn_under_a_kept_version_is_what_it_drew(session: Any, first: Any) -> None:
    before = standing(session)
    now = session.rollout(PROMPTS, **HOW)
    again = session.rollout(PROMPTS, adapter=session.snapshots["first"], **HOW)
    assert again.texts == first.texts != now.texts
    np.testing.assert_array_equal(again.logprobs, first.logprobs)
    assert set(again.versions.tolist()) == set(first.versions.tolist()) != set(now.versions.tolist())
    assert session.rollout(PROMPTS, **HOW).texts == now.texts, "the replicas have their own weights again"
    assert standing(session) == before


def test_a_completion_is_continued_by_what_the_policy_was_and_is(session: Any, first: Any) -> None:
    before, kept = standing(session), session.snapshots["first"]
    lent = first.fork(5, at=2, n=3, under=kept)
    tree = lent.fork(5, at=2, n=3)
    assert sorted(branch.under for branch in tree.branches) == ["", "first"]
    assert "under first" in repr(lent.branches[0])
    samples = lent.branches[0].samples
    assert {int(lent.versions[i]) for i in samples} == {kept.version}
    assert standing(session) == before
    held = session.snapshot("held")
    session.restore("first")
    by_then = first.fork(5, at=2, n=3)
    session.restore(held)
    session.drop(held)
    assert by_then.texts == lent.texts
    np.testing.assert_array_equal(by_then.logprobs, lent.logprobs)
    assert first.fork(5, at=2, n=3).texts != lent.texts


def test_gradients_that_wait_are_left_alone(session: Any, first: Any) -> None:
    batch = first.batch(advantage=rb.rl.group_normalized())
    held = session.snapshot("held")
    stepped = []
    for draws in (False, True):
        session.restore(held)
        session.forward_backward(batch)
        if draws:
            session.rollout(PROMPTS, adapter="first", **HOW)
        session.optim_step(lr=1e-2)
        stepped.append(session.train.call_all("state_checksum").result())
    session.restore(held)
    session.drop(held)
    assert stepped[0] == stepped[1]


def test_it_chats_and_is_evaluated_beside_the_policy(session: Any, first: Any) -> None:
    chat = session.chat([None, "first"], n=1, max_tokens=4).say("sort 21")
    versions = session.inference.weight_versions()[0], session.snapshots["first"].version
    assert [one.speaker for one in chat.answers] == [f"policy v{versions[0]}", f"first v{versions[1]}"]
    assert chat.fork(1, at=1, n=2).branches[0].under == "first"
    found = session.evaluate(PROMPTS, reward, adapter=session.snapshots["first"], **HOW)
    assert found.reward == pytest.approx(float(first.rewards.mean()))


def test_ctrl_c_keeps_what_is_drawn_and_gives_the_replicas_their_weights_back(session: Any, first: Any) -> None:
    before = standing(session)
    interrupt_once(lambda: generates(session))
    with pytest.raises(Stopped) as stopped:
        session.rollout(PROMPTS, adapter="first", **HOW | {"n": 64, "max_tokens": 400})
    assert stopped.value.partial.aborted.any()
    assert standing(session) == before


def test_what_cannot_be_lent_is_said_and_nothing_has_changed(session: Any, first: Any) -> None:
    before = standing(session)
    with pytest.raises(SessionError, match=r"nearest: first"):
        first.fork(0, at=2, under="frist")
    with pytest.raises(SessionError, match="one set of weights") as refused:
        session.policy("first")
    assert "Kept versions" not in str(refused.value), "an endpoint serves none"
    gone = session.snapshot("gone")
    shutil.rmtree(gone.folder)
    with pytest.raises(CheckpointError, match="is not there for rank 0"):
        first.fork(0, at=2, under="gone")
    session.drop(gone)
    assert standing(session) == before


def test_a_viewer_offers_kept_versions_the_last_first(session: Any, first: Any) -> None:
    newer = session.snapshot("newer")
    names = session.inference.names_under()
    assert names.index("newer") < names.index("first")
    session.drop(newer)
