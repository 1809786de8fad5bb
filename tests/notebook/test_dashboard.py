"""The dashboard: what it makes of the answers of a monitor, what a saved notebook keeps, what it sends."""

import base64
import re
import time

import pytest
from IPython.core.interactiveshell import InteractiveShell

from rlbench.notebook.base.palette import OWNERS
from rlbench.notebook.dashboard import html as dashboard_html
from rlbench.notebook.dashboard.dashboard import Dashboard
from rlbench.notebook.dashboard.data import view
from rlbench.notebook.dashboard.feed import Feed
from rlbench.notebook.dashboard.memory import memory, seen_and_thin, thinned
from tests.clock import until
from tests.scripted_monitor import GIB, MIB, blank, played

pytestmark = pytest.mark.slow

NOW = 1_795_000_000.0
HOSTILE = "<b>x</b></script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e"


@pytest.fixture
def script(request):
    made = played(f"dash-{abs(hash(request.node.name)) % 10**8}")
    yield made
    made.close()


@pytest.fixture
def shown(script):
    made = Dashboard(script.name)
    yield made
    made.close()


# -- what it makes of the answers


def test_a_monitor_that_tells_nothing_leaves_the_panels_empty():
    found = view({})
    assert found.lengths == [] and found.split is None and not found.buttons
    assert memory([], (), {}).lanes == ()
    assert [curve["points"] for curve in found.curves] == [[]] * 5


def test_of_a_session_that_is_closed_nothing_can_be_pressed(script):
    state = Feed.of(script.name).look().state
    gone = view(state, gone="session s is closed")
    controls = [*gone.buttons, *gone.toggles]
    assert {one["title"] for one in controls} == {"session s is closed"} and not any(o["enabled"] for o in controls)


def test_what_runs_is_said_with_what_holds_it(script):
    assert view(Feed.of(script.name).look().state).phase.startswith("rollout 43 · 28/64 samples")
    script.state["paused"] = True
    assert view(Feed.of(script.name).look().state).phase.endswith("tokens · paused")
    script.state["running"] = []
    assert view(Feed.of(script.name).look().state).phase == "paused"


def test_memory_is_stacked_by_owner_and_what_is_not_known_is_other():
    samples = [
        {
            "time": NOW,
            "resident": {"rlbench/s/actor/0": 300 * MIB, "rlbench/s/inference/0": GIB},
            "gpus": [],
            "owners": {"rlbench/s/actor/0": {"weights": 100 * MIB, "optimizer": 150 * MIB, "other": 50 * MIB}},
            "shared": {"rlbench/s/actor/0": 20 * MIB},
        },
        {"time": NOW + 1, "resident": {"rlbench/s/actor/0": 300 * MIB}, "gpus": [{"used": GIB, "total": 4 * GIB}]},
    ]
    marks = [{"time": NOW, "seconds": None, "what": "oom", "label": "inference 0", "engine": "inference"}]
    found = memory(samples, marks, blank("s"))
    gpu, actor, replica = found.lanes
    assert (gpu.name, gpu.total) == ("GPU 0", 4096) and gpu.owners[-1] == (None, 1024)
    assert [values[0] for values in actor.owners] == [100, 0, 150, 0, 0, 50] and len(OWNERS) == 6
    assert actor.owners[-1][1] == 300, "no owners were measured in the second sample"
    assert replica.owners[-1] == (1024, None), "it is gone"
    assert found.marks == ((NOW, None, "oom", "inference 0"),)
    assert memory(samples[:1], (), blank("s")).lanes[0].detail == "shared 20 MiB"


def test_the_legend_names_what_the_picture_shows_and_says_why_the_rest_is_not_seen():
    actor, replica = "rlbench/s/actor/0", "rlbench/s/inference/0"
    told = {
        "time": NOW + 1,
        "resident": {actor: 900 * MIB, replica: GIB},
        "gpus": [],
        "owners": {
            actor: {
                "weights": 2 * MIB,
                "gradients": 0,
                "optimizer": 4 * MIB,
                "activations": 90 * MIB,
                "other": 804 * MIB,
            },
            replica: {"weights": 2 * MIB, "kv_cache": 200 * MIB, "other": 822 * MIB},
        },
    }
    shown = memory([told], (), blank("s"))
    assert seen_and_thin(shown) == (["kv_cache", "activations", "other"], ["weights", "optimizer"])
    key = dashboard_html._memory(shown)
    assert "■</span> activations" in key and "■</span> weights" not in key
    assert "too thin to see: weights, optimizer" in key and "grey at first" not in key
    unasked = told | {"time": NOW, "owners": {}}
    both = memory([unasked, told], (), blank("s"))
    assert both.untold == NOW and "grey at first" in dashboard_html._memory(both)
    assert memory([unasked | {"gpus": [{"used": GIB, "total": 4 * GIB}]}], (), blank("s")).untold == NOW


def test_lengths_of_a_running_rollout_grow_over_all_replicas():
    state = blank("s") | {"lengths": [{"rollout": 1, "samples": 2, "edges": [0, 8], "counts": [2], "p50": 3}]}
    told = [
        {"lengths": {"width": 1, "counts": [0, 1, 2, 3]}},
        {"lengths": {"width": 2, "counts": [4, 0, 1]}},
        {},
    ]
    state["running"] = [{"id": "a", "what": "rollout 2", "engine": "e", "since": NOW, "progress": told}]
    before, now = view(state).lengths
    assert (before["rollout"], now["rollout"], now["samples"]) == ("rollout 1", "rollout 2 so far", 11)
    assert now["edges"] == [0, 2, 4, 6] and now["counts"] == [5, 5, 1] and now["p50"] is None
    state["running"][0]["progress"] = [{"lengths": {"width": 1, "counts": []}}]
    assert len(view(state).lengths) == 1


def test_moments_where_nothing_changed_are_left_out_and_the_ends_stay():
    moments = [(float(i), 1 if i < 50 else 2) for i in range(100)]
    assert [time for time, _ in thinned(moments, 10)] == [0.0, 49.0, 50.0, 99.0]
    busy = [(float(i), i) for i in range(1000)]
    kept = thinned(busy, 100)
    assert len(kept) <= 100 and kept[0] == (0.0, 0) and kept[-1] == (999.0, 999)


def test_numbers_that_are_missing_or_not_finite_leave_a_gap():
    history = [
        {"step": 1, "reward": 0.5, "kl": None},
        {"step": 2, "reward": None},
        {"step": 3, "reward": float("nan")},
    ]
    reward, kl, *_ = view(blank("s") | {"history": history}).curves
    assert reward["points"] == [[1, 0.5]] and kl["points"] == []


# -- what a saved notebook keeps


def test_the_static_page_has_the_numbers_the_pictures_and_stays_small(script):
    made = Dashboard(script.name)
    page, text = made._repr_html_(), repr(made)
    for said in (
        "step 42",
        "v41, 1 version behind",
        "rollout 43 · 28/64 samples",
        "optimizer ● resident",
        "truncated 6.25 %",
    ):
        assert said in page, said
    for said in ("p50 ", "reward 0.7", "step 1.9 s = rollout 0.9", "weights ● resident"):
        assert said in text, said
    drawings = [base64.b64decode(data).decode() for data in re.findall(r"base64,([^\"]+)", page)]
    assert sum("polygon" in one for one in drawings) == 4 and sum("<rect" in one for one in drawings) == 1
    assert len(page) < 100_000 and "<script" not in page
    made.close()


def test_what_others_wrote_is_inert(script):
    script.state |= {"model": HOSTILE, "branch": HOSTILE}
    script.state["last_error"] = {"what": HOSTILE, "kind": "ValueError", "message": HOSTILE, "time": NOW}
    script.state["running"][0]["what"] = HOSTILE
    script.state["engines"][0] |= {"broken": HOSTILE, "executor": HOSTILE}
    script.state["lengths"][-1]["rollout"] = HOSTILE
    script.memory[-1]["resident"] = {f"rlbench/x/{HOSTILE}": GIB}
    made = Dashboard(script.name)
    html = made._repr_html_() + "".join(
        child.value for row in made._rows.children for child in (row.children[0], row.children[-1])
    )
    assert "alert(1)" in html
    assert "<script" not in html and "<img src=x" not in html
    made.close()


# -- the feed


def test_one_sampler_serves_all_views_and_ends_with_the_last(script):
    feed, first, second = Feed.of(script.name), [], []
    assert Feed.of(script.name) is feed
    feed.listen(first.append)
    feed.listen(second.append)
    until(lambda: first and second)
    feed.leave(first.append)
    assert feed.running
    feed.leave(second.append)
    until(lambda: not feed.running)
    feed.listen(first.append)
    until(lambda: feed.running)
    feed.leave(first.append)


def test_only_what_is_new_is_asked_for(script):
    feed = Feed.of(script.name)
    frame = feed.look()
    assert len(frame.samples) == 360 and len(frame.state["history"]) == 42
    script.memory.append(script.memory[-1] | {"time": time.time()})
    running = next(mark for mark in script.marks if mark["seconds"] is None)
    running["seconds"] = 4.5
    again = feed.look()
    assert len(again.samples) == 361 and again.samples[:360] == frame.samples
    assert len(again.marks) == len(frame.marks), "the mark that ran has been replaced, not added"
    assert again.state["history"] is frame.state["history"], "no step was taken: not asked for again"
    script.state["history"] = [*script.state["history"], {"step": 43, "reward": 0.9}]
    assert feed.look().state["history"][-1]["step"] == 43


def test_a_monitor_that_restarts_is_found_again(script):
    feed = Feed.of(script.name)
    feed.look()
    script.stop()
    silent = feed.look()
    assert "does not answer" in silent.trouble and not silent.ended and silent.state["step"] == 42
    script.start()
    assert feed.look().trouble == ""


def test_a_closed_session_ends_the_feed_and_its_numbers_stay(script, shown):
    heard = []
    feed = Feed.of(script.name)
    feed.listen(heard.append)
    until(lambda: heard)
    script.close()
    until(lambda: heard[-1].ended)
    until(lambda: not feed.running)
    assert heard[-1].state["step"] == 42 and "is closed" in heard[-1].trouble
    assert Feed.of(script.name) is not feed, "a new session of that name gets a feed of its own"


def test_a_view_that_fails_is_dropped_and_the_others_go_on(script, caplog):
    feed, heard = Feed.of(script.name), []

    def broken(frame):
        raise ValueError("this view fails")

    feed.listen(broken)
    feed.listen(heard.append)
    until(lambda: len(heard) >= 2)
    feed.leave(heard.append)
    assert caplog.text.count("is not updated any more") == 1


# -- what is sent, and what a press does


class Wire:
    """What a widget sends, counted."""

    def __init__(self, monkeypatch, widget):
        self.states, self.messages = [], []
        monkeypatch.setattr(widget, "send_state", lambda key=None: self.states.extend(key or ()))
        monkeypatch.setattr(widget, "send", lambda content, buffers=None: self.messages.append(content))


def test_nothing_is_sent_where_nothing_changed(script, shown, monkeypatch):
    script.state["running"] = []
    shown._hear_frame(shown._feed.look())
    head, charts = Wire(monkeypatch, shown._head), Wire(monkeypatch, shown._charts)
    for _ in range(3):
        script.memory.append(script.memory[-1] | {"time": time.time()})
        shown._hear_frame(shown._feed.look())
    assert head.states == charts.states == charts.messages == []


def test_new_moments_are_sent_alone_and_a_late_page_gets_all_of_them_thinned(script, shown, monkeypatch):
    shown._hear_frame(shown._feed.look())
    wire = Wire(monkeypatch, shown._charts)
    grown = {name: size + 64 * MIB for name, size in script.memory[-1]["resident"].items()}
    script.memory.append(script.memory[-1] | {"time": time.time(), "resident": grown, "owners": {}})
    script.marks[-1]["seconds"] = 4.5
    shown._hear_frame(shown._feed.look())
    (message,) = wire.messages
    assert len(message["memory"]["times"]) == 1
    assert [(seconds, what) for _, seconds, what, _ in message["memory"]["marks"]] == [(4.5, "rollout")]
    whole = shown._charts.get_state()["memory"]
    assert whole["times"][-1] == message["memory"]["times"][0] and 100 < len(whole["times"]) <= 300
    assert len(str(shown._charts.get_state())) + len(str(shown._head.get_state())) < 200_000


def press(shown, key):
    """What the page sends where there is no Jupyter server to go to; returns what is said in the end."""
    shown._hear(shown._head, {"do": key, "id": key, "page": "p"}, [])
    until(lambda: shown._head.said.get("id") == key)
    return shown._head.said


def test_a_press_acts_and_the_toggle_shows_what_was_measured(script, shown):
    script.state["running"] = []
    shown._hear_frame(shown._feed.look())
    toggle = shown._rows.children[0].children[2]
    assert (toggle.value, toggle.description) == (True, "optimizer ● resident")
    assert press(shown, "actor/optimizer")["command"]["result"]["optimizer"] == "cpu"
    assert script.done == [("offload", {"engine": "actor", "parts": ["optimizer"]})]
    assert toggle.value is True, "what it shows was measured before"
    shown._hear_frame(shown._feed.look())
    assert (toggle.value, toggle.description) == (False, "optimizer ○ host")


def test_a_press_that_is_refused_says_what_runs(script, shown):
    assert press(shown, "sync")["error"] == "sync: rollout 43 runs; stop it first, or wait for it"
    assert "not offered" in press(shown, "nonsense")["error"]
    assert press(shown, "stop")["command"]["result"] == {"stopped": ["rollout 43"]}
    assert press(shown, "sync")["command"]["state"] == "done"


def test_the_feed_rests_while_no_page_shows_the_view(script, shown):
    feed = Feed.of(script.name)
    shown._hear(shown._head, {"here": True, "page": "one"}, [])
    shown._hear(shown._head, {"here": True, "page": "two"}, [])
    until(lambda: feed.running)
    shown._hear(shown._head, {"gone": True, "page": "one"}, [])
    time.sleep(0.1)  # for what must not happen there is no event
    assert feed.running
    shown._hear(shown._head, {"gone": True, "page": "two"}, [])
    until(lambda: not feed.running)


def test_engines_that_come_or_go_get_other_rows(script, shown):
    assert [len(row.children) - 2 for row in shown._rows.children] == [2, 1, 2]
    script.state["engines"] = script.state["engines"][:2]
    shown._hear_frame(shown._feed.look())
    assert [len(row.children) - 2 for row in shown._rows.children] == [2, 1]


def test_outside_a_notebook_it_prints_its_text(script, shown, capsys):
    shown._ipython_display_()
    assert dashboard_html.text(shown._view) in capsys.readouterr().out


@pytest.fixture
def shell():
    """An interactive shell of the test's own: who asks for one later gets none that this one left."""
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def test_the_clock_knows_how_long_the_cell_runs_and_took(shell, monkeypatch):
    from rlbench.notebook.dashboard import dashboard

    now = [100.0]
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    monkeypatch.setattr(dashboard.time, "monotonic", lambda: now[0])
    clock = dashboard.CellClock()
    now[0] = 112.0
    assert clock.text() == "cell 12 s"
    shell.events.trigger("post_run_cell", None)
    now[0] = 150.0
    assert clock.text() == "cell total 12 s"
    shell.events.trigger("pre_run_cell", None)
    now[0] = 153.0
    assert clock.text() == "cell 3 s"
    clock.close()
    shell.events.trigger("post_run_cell", None)
    assert clock.text() == "cell 3 s", "it no longer follows"


@pytest.mark.engine
def test_a_real_monitor_is_shown_stopped_and_followed_through_its_restart(cluster):
    import os
    import signal

    from rlbench.dispatch.link import Link
    from rlbench.errors import Stopped
    from rlbench.monitor import client
    from tests.echo_engine import echo, submit

    link = Link.create("dashboard")
    host, _ = echo(link)
    made = Dashboard("dashboard")
    made.follow()
    pending = submit(link, host, "slowly", 120.0, what="rollout 8", track=True)
    until(lambda: made._view.phase.startswith("rollout 8"))
    until(lambda: [lane["name"] for lane in made._charts.whole_memory()["lanes"]] == ["echo 0"])
    assert press(made, "stop")["command"]["result"] == {"stopped": ["rollout 8"]}
    with pytest.raises(Stopped):
        pending.result(timeout=60)
    until(lambda: made._view.phase == "idle")
    assert any(mark["label"] == "rollout 8" for mark in made._feed.frame.marks)

    before = client.find("dashboard")
    os.kill(before["pid"], signal.SIGKILL)
    link.state()
    until(lambda: client.find("dashboard")["token"] != before["token"])
    until(lambda: made._feed.frame.asked > time.time() - 2 and not made._feed.frame.trouble)
    link.close()
    until(lambda: made._feed.frame.ended)
    assert not any(c["enabled"] for c in (*made._view.buttons, *made._view.toggles))
    made.close()


def test_evaluations_are_curves_behind_those_of_training():
    history = [{"step": 1, "reward": 0.5, "eval/gsm8k/reward": 0.25, "eval/gsm8k/pass@8": 1.0}, {"step": 2}]
    *training, last = view(blank("s") | {"history": history}).curves
    assert len(training) == 5 and last == {"label": "eval/gsm8k", "unit": "", "points": [[1, 0.25]]}


def test_steps_without_a_signal_are_a_curve_where_there_are_any():
    some = view(blank("s") | {"history": [{"step": 1, "no_signal": 0.0}, {"step": 2, "no_signal": 1.0}]}).curves
    none = view(blank("s") | {"history": [{"step": 1, "no_signal": 0.0}, {"step": 2}]}).curves
    assert some[5] == {"label": "no signal", "unit": "", "points": [[1, 0.0], [2, 1.0]]} and len(none) == 5
