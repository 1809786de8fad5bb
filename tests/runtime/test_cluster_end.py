"""When a cluster counts as gone: ours at once, one that others run after the time a restart takes."""

import pytest

from rlbench.runtime import cluster
from tests.clock import HandClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    made = HandClock()
    monkeypatch.setattr(cluster.time, "monotonic", made)
    monkeypatch.setattr(cluster, "_silent_since", None)
    return made


def joined(monkeypatch: pytest.MonkeyPatch, cluster_id: str) -> list[bool]:
    """Be on a cluster; returns whether it answers, the last of the list."""
    answers = [True]
    monkeypatch.setattr(cluster, "_joined", cluster.Cluster("127.0.0.1:9", 2, 0, cluster_id))
    monkeypatch.setattr(cluster.guard, "answers", lambda address, timeout_s: answers[-1])
    return answers


def test_without_a_cluster_none_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_joined", None)
    assert not cluster.has_ended()


def test_ours_has_ended_as_soon_as_nothing_answers(monkeypatch: pytest.MonkeyPatch, clock: HandClock) -> None:
    answers = joined(monkeypatch, "ours")
    assert not cluster.has_ended()
    answers.append(False)
    assert cluster.has_ended()


def test_one_of_others_may_be_restarted_within_a_minute(monkeypatch: pytest.MonkeyPatch, clock: HandClock) -> None:
    answers = joined(monkeypatch, "")
    answers.append(False)
    assert not cluster.has_ended()
    clock.pass_by(cluster.RESTART_S - 1)
    assert not cluster.has_ended()
    answers.append(True)
    assert not cluster.has_ended()
    answers.append(False)
    clock.pass_by(cluster.RESTART_S - 1)
    assert not cluster.has_ended(), "the minute begins anew"
    clock.pass_by(cluster.RESTART_S + 1)
    assert cluster.has_ended()
