"""A seeded schedule of interrupts and kills: the session stands where it stood, goes on, and leaves nothing behind."""

from __future__ import annotations

import pytest

from benchmarks import faults

pytestmark = pytest.mark.engine


def check(tallies: list[faults.Tally]) -> None:
    lost = [f"{tally.fault}: {reason}" for tally in tallies for reason in tally.lost]
    assert not lost, "\n".join(lost)
    assert all(tally.survived == tally.tries > 0 for tally in tallies)


@pytest.mark.curve
def test_interrupts_at_random_points_of_every_verb_are_survived(cluster, tiny_path) -> None:
    check(faults.run(interrupts=2, kills=0, others=1, seed=11, name="faults-short"))


@pytest.mark.long
def test_a_hundred_interrupts_and_thirty_kills_are_survived(cluster, tiny_path) -> None:
    tallies = faults.run(interrupts=15, kills=8, others=5, seed=5, name="faults-long")
    check(tallies)
    assert sum(t.tries for t in tallies if t.fault.startswith("Ctrl-C")) >= 100
    assert sum(t.tries for t in tallies if t.fault.startswith("kill")) >= 30
