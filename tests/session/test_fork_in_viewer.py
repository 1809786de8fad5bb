"""A viewer's form continues completions by the session's engine: what becomes of it, in words and as a tree."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import rlbench as rb
from rlbench.data import Rollouts
from rlbench.notebook import viewer
from rlbench.tiny import tasks
from tests.clock import until
from tests.session.looking import generates

pytestmark = pytest.mark.engine


def reward(rollout: Any) -> float:
    return float(len(set(rollout.token_ids)))


@pytest.fixture(scope="module")
def rollouts(session: Any) -> Rollouts:
    sampling = {"n": 4, "max_tokens": 7, "ignore_eos": True, "seed": 7, "temperature": 2.0}
    return session.rollout(tasks.prompts(3, seed=1), **sampling).score(reward)


def press(shown: Any, kind: str, **fields: Any) -> None:
    defaults = {"sample": 0, "at": 1, "n": 4, "text": "", "under": ""} if kind == "fork" else {}
    shown.drawing.answer({"id": "view.1", "kind": kind, **defaults, **fields})


def told(shown: Any) -> dict[str, Any]:
    """What the form says once nothing runs any more."""
    until(lambda: not shown.drawing.fork["busy"])
    return shown.drawing.fork


def test_a_press_makes_the_tree_that_a_cell_makes_and_a_cell_reaches_it(rollouts: Rollouts) -> None:
    shown = viewer(rollouts, filter="all", sort="reward ↓")
    assert rollouts.tree is rollouts and shown.drawing.fork["why"] == ""
    press(shown, "fork", sample=5, at=2, n=6)
    said = told(shown)
    by_cell = rollouts.fork(5, at=2, n=6)
    assert shown.rollouts.texts == by_cell.texts and rollouts.tree is shown.rollouts
    (branch,) = by_cell.branches
    assert said["said"].startswith(f"6 continuations · value {branch.value:.3g} ± ") and "rollouts.tree" in said["said"]
    assert said["name"] == "rollouts.fork(5, at=2, n=6)" and not said["bad"]
    drawing = shown.drawing
    assert drawing.grown == {"after": 8, "by": 6, "key": drawing.tree[0]["key"], "times": 1}
    assert (drawing.tree[0]["of"], drawing.tree[0]["kept"], drawing.tree[0]["samples"]) == (5, 2, list(range(8, 14)))
    assert {row["i"] for row in drawing.first["rows"]} == {*range(4, 14)}
    assert [row["born"] for row in drawing.first["rows"] if row["i"] >= 8] == [2] * 6
    assert shown.sort.value == "reward ↓" and "all · 18" in dict(shown.filter.options)
    assert "12 rollouts · 3 prompts × 4" in shown._header.value and "6 continuations" in shown._header.value
    press(shown, "fork", sample=9, at=4, n=2)
    assert told(shown)["name"] == "rollouts.fork(5, at=2, n=6).fork(9, at=4, n=2)"
    again = by_cell.fork(9, at=4, n=2)
    assert rollouts.tree.texts == again.texts and [b["of"] for b in drawing.tree] == [5, 9]


def test_what_is_behind_a_text_and_in_an_earlier_prompt_is_found_where_it_stands_now(rollouts: Rollouts) -> None:
    shown = viewer(rollouts)
    press(shown, "fork", sample=5, at=2, n=2, text="99")
    told(shown)
    press(shown, "fork", sample=0, at=3, n=3)
    told(shown)
    first, second = shown.drawing.tree
    assert (first["of"], first["samples"]) == (0, [4, 5, 6]) and (second["of"], second["kept"]) == (8, 2)
    assert second["text"] == "99" and shown.rollouts.infos[second["samples"][0]]["fork"]["of"] == 8


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"at": 99}, "completion 0 has 7 tokens; at=99 is not among them"),
        ({"at": 7}, "max_tokens=7 leaves none behind token 7"),
        ({"under": "base"}, "the replicas hold one set of weights"),
    ],
)
def test_what_cannot_be_continued_is_said_and_the_view_stays(rollouts: Rollouts, fields: Any, said: str) -> None:
    shown = viewer(rollouts)
    press(shown, "fork", **fields)
    assert told(shown)["bad"] and said in told(shown)["said"]
    assert shown.rollouts is rollouts and shown.drawing.grown == {}


def test_a_stop_keeps_what_was_drawn(session: Any) -> None:
    long = session.rollout(["sort 31"], n=2, max_tokens=1600, ignore_eos=True)
    shown = viewer(long)
    press(shown, "fork", n=512)
    until(lambda: "/512 continuations" in shown.drawing.fork["said"])
    press(shown, "fork", n=2)  # one at a time
    begin = time.monotonic()
    press(shown, "stop")
    said = told(shown)
    assert said["said"].startswith("stopped") and time.monotonic() - begin < 30
    assert not generates(session)
    tree = shown.rollouts
    assert tree.samples == 2 or tree.aborted.any()
    assert session.rollout(["sort 31"], max_tokens=2).samples == 1


def test_an_engine_that_does_not_begin_is_said_to_be_busy_and_what_waits_can_be_stopped(session: Any) -> None:
    short = session.rollout(["sort 31"], n=2, max_tokens=4, ignore_eos=True)
    other = session.rollout(["sort 31"], n=512, max_tokens=1600, ignore_eos=True, block=False)
    until(lambda: generates(session))
    shown = viewer(short)
    press(shown, "fork")
    until(lambda: "busy" in shown.drawing.fork["said"])
    press(shown, "stop")
    other.stop()
    with pytest.raises(rb.Stopped):
        other.result()
    assert told(shown)["said"] == "stopped: nothing was added" and shown.rollouts is short


def test_a_reward_that_raises_is_told_and_one_that_takes_long_can_be_let_go(session: Any) -> None:
    free, scores = threading.Event(), threading.Event()

    def slow(rollout: Any) -> float:
        if rollout.info.get("fork"):
            scores.set()
            assert free.wait(60)
            raise ValueError("no luck")
        return 0.0

    rollouts = session.rollout(["sort 31"], n=2, max_tokens=4, ignore_eos=True).score(slow)
    shown = viewer(rollouts)
    press(shown, "fork", n=2)
    assert scores.wait(60)
    press(shown, "stop")
    assert "nothing was added" in told(shown)["said"] and shown.rollouts is rollouts
    free.set()
    press(shown, "fork", n=2)
    assert "no value: scoring failed for 2 of 2" in told(shown)["said"]
    assert shown.rollouts.samples == 4, "the one that was let go added nothing"


def test_kept_versions_and_the_name_in_cells_are_looked_up_when_they_are_asked_for(
    session: Any, rollouts: Rollouts
) -> None:
    shown = viewer(rollouts)
    assert shown.drawing.fork["under"] is None
    press(shown, "choices")
    until(lambda: shown.drawing.fork["under"] is not None)
    kept = [snapshot.label for snapshot in session.snapshots]
    assert sorted(shown.drawing.fork["under"]) == sorted(kept) and shown.drawing.fork["name"] == "rollouts"


def test_rewards_that_were_numbers_are_gone_and_it_says_so(rollouts: Rollouts) -> None:
    listed = rollouts.score(list(rollouts.rewards))
    shown = viewer(listed, sort="reward ↓")
    press(shown, "fork", n=2)
    assert "not scored" in told(shown)["said"] and "score the tree again" in told(shown)["said"]
    assert shown.sort.value == "prompt" and shown.rollouts.rewards is None
