"""What a session's report says to a reader: phases, controls, notes; and that the side panel has the same types."""

import runpy
from pathlib import Path

import pytest

from rlbench.monitor.schema import english
from rlbench.monitor.view import view_of
from tests.scripted_monitor import blank, engine

NOW = 1_795_000_000.0
ROLLOUT = {"id": "a", "what": "rollout 5", "engine": "inference", "since": NOW - 10}
DEAD = {"pid": 7, "mode": "notebook", "alive": False}


def controls(state):
    """Every control of the view by key, its texts in English."""
    found = view_of(state, NOW)
    every = [*found["controls"], *(part["toggle"] for row in found["engines"] for part in row["parts"])]
    every += [row["toggle"] for row in found["engines"] if row["toggle"]]
    return {c["key"]: c | {k: english(c[k]) for k in ("label", "name", "command", "title")} for c in every}


def running(**progress):
    return blank("s") | {"running": [ROLLOUT | {"progress": [progress]}]}


def notes(state):
    return {row["name"]: (english(row["note"]), row["warns"]) for row in view_of(state, NOW)["engines"]}


def test_the_panels_schema_texts_and_reports_are_those_of_the_monitor():
    path = Path(__file__).parents[2] / "scripts" / "panel_schema.py"
    assert runpy.run_path(str(path))["main"](["--check"]) == 0


@pytest.mark.parametrize(
    ("change", "condition", "status"),
    [
        ({}, "idle", "idle"),
        ({"running": [ROLLOUT]}, "running", "running"),
        ({"verbs": [{"what": "train_step", "since": NOW}]}, "running", "running"),
        ({"paused": True, "running": [ROLLOUT]}, "paused", "paused"),
        ({"driver": DEAD, "running": [ROLLOUT]}, "lost", "kernel gone"),
        ({"driver": DEAD | {"mode": "script"}}, "lost", "script ended"),
        ({"driver": None}, "idle", "idle"),
    ],
)
def test_how_a_session_is(change, condition, status):
    found = view_of(blank("s") | change, NOW)
    assert (found["condition"], english(found["status"])) == (condition, status)


def test_the_facts_tell_when_a_session_nobody_drives_ends():
    held = blank("s") | {"lease": {"left_s": 90.0}, "branch": "fork", "step": 3}
    assert list(map(english, view_of(held, NOW)["facts"])) == ["tiny", "step 3", "v0", "fork"]
    assert english(view_of(held | {"driver": DEAD}, NOW)["facts"][-1]) == "ends in 90 s"


def test_a_toggle_shows_where_the_part_is_and_says_what_a_press_frees():
    state = blank("s")
    here = controls(state)
    assert here["actor/optimizer"]["pressed"]
    assert here["actor/optimizer"]["title"] == "Offload optimizer of actor to host: frees 1.2 GiB"
    assert here["inference/kv_cache"]["title"] == "Release the KV cache of inference: frees 1 GiB"
    assert here["inference"]["title"] == "Offload weights, KV cache of inference: frees 1.39 GiB"
    state["engines"][0]["state"]["optimizer"] = "cpu"
    away = controls(state)["actor/optimizer"]
    assert (away["pressed"], away["verb"]) == (False, "onload")
    assert away["args"] == {"engine": "actor", "parts": ["optimizer"]}
    assert away["label"] == "optimizer ○ host" and away["title"] == "Make optimizer of actor resident again"
    assert controls(state)["actor"]["args"]["parts"] == ["weights"], "what is away does not go again"


def test_where_nothing_is_freed_or_known_a_press_says_so():
    state = blank("s")
    state["engines"][0]["frees"] = {"weights": 0}
    assert controls(state)["actor/weights"]["title"].endswith("here the device is host memory, nothing is freed")
    del state["engines"][0]["bytes"], state["engines"][0]["frees"]
    assert controls(state)["actor/optimizer"]["title"] == "Offload optimizer of actor to host"


def test_a_part_that_an_engine_does_not_have_has_no_toggle():
    state = blank("s")
    state["engines"][0]["state"]["optimizer"] = "none"
    assert "actor/optimizer" not in controls(state) and controls(state)["actor/weights"]["pressed"]


def test_what_cannot_be_done_now_says_why():
    state = blank("s")
    assert not controls(state)["stop"]["enabled"] and "nothing runs" in controls(state)["stop"]["title"]
    state["running"] = [ROLLOUT]
    assert controls(state)["stop"]["enabled"] and controls(state)["pause"]["enabled"]
    for key in ("sync", "snapshot", "actor/weights"):
        assert not controls(state)[key]["enabled"]
        assert controls(state)[key]["title"] == "rollout 5 runs: stop it first, or wait for it"
    state |= {"running": [], "paused": True}
    assert controls(state)["resume"]["enabled"] and "pause" not in controls(state)
    state["engines"][1]["ready"] = False
    assert controls(state)["sync"]["title"] == "the engines are being built"


def test_a_stale_replica_and_a_broken_engine_are_noted():
    state = blank("s") | {"version": 5}
    state["engines"][2] = engine("inference", "inference", "s", 1, version=3)
    state["engines"][0]["broken"] = "rank 0 died"
    assert notes(state) == {
        "inference": ("v3, 2 versions behind", True),
        "actor": ("rank 0 died: session.heal()", True),
        "reference": ("frozen", False),
    }
    state["engines"][0] |= {"broken": None, "ready": False}
    assert notes(state | {"version": 4}) == {
        "inference": ("v3, 1 version behind", True),
        "actor": ("being built", False),
        "reference": ("frozen", False),
    }


@pytest.mark.parametrize(
    ("progress", "text", "fraction"),
    [
        ([], "rollout 5", None),
        (
            [{"tokens": 10, "finished": 1, "total": 4}, {"tokens": 5, "finished": 2, "total": 4}],
            "rollout 5 · 3/8 samples · 15 tokens",
            0.375,
        ),
        (
            [{"phase": "backward", "done": 7, "total": 16}, {"phase": "backward", "done": 4, "total": 16}],
            "rollout 5 · backward 4/16",
            0.25,
        ),
    ],
)
def test_the_phase_adds_replicas_and_follows_the_slowest_rank(progress, text, fraction):
    phase = view_of(blank("s") | {"running": [ROLLOUT | {"progress": progress}]}, NOW)["phase"]
    assert (" · ".join(map(english, phase["what"])), phase["fraction"]) == (text, fraction)
    left = None if fraction is None else round(10 * (1 - fraction) / fraction)
    assert english(phase["left"]) == ("" if left is None else f"{left} s left")


def test_no_time_is_guessed_from_too_little_nor_while_it_is_paused():
    assert view_of(running(finished=1, total=64), NOW)["phase"]["left"] == ""
    assert view_of(running(finished=32, total=64) | {"paused": True}, NOW)["phase"]["left"] == ""


def test_a_verb_names_the_call_it_makes_where_that_does_not():
    state = running() | {"verbs": [{"what": "train_step", "since": NOW}]}
    assert view_of(state, NOW)["phase"]["what"] == ["train_step: rollout 5"]
    assert view_of(state | {"running": []}, NOW)["phase"] == {
        "what": ["train_step"],
        "busy": True,
        "fraction": None,
        "left": "",
    }


def test_what_others_wrote_is_cut_and_never_a_template():
    long = "%1" * 500_000
    state = blank("s") | {"model": long, "last_error": {"what": long, "kind": long, "message": long, "time": NOW}}
    state["running"] = [ROLLOUT | {"what": long, "progress": []}]
    state["engines"][0]["broken"] = long
    assert len(str(view_of(state, NOW))) < 40_000
    assert controls(state)["sync"]["title"].startswith("%1%1")
    assert len(view_of(state, NOW)["failure"]["text"]) == 300
