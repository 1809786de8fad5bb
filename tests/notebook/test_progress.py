"""The progress line: redrawn in place, at most four times a second, and the cost line that stays."""

import contextlib
import re
from html.parser import HTMLParser

import pytest

from rlbench.dispatch import views as progress_views
from rlbench.dispatch.protocol import Progress
from rlbench.notebook import install
from rlbench.notebook.live import progress
from rlbench.notebook.live.progress import Line
from tests.data.values import rollouts
from tests.notebook.terminal import Terminal


def test_progress_is_summed_over_replicas():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        view = progress.GenerateProgress(total=8)
        view(
            [
                Progress(values={"finished": 1, "tokens": 600}),
                Progress(values={"finished": 3, "tokens": 900}),
            ]
        )
        (line,) = terminal.drawn
        assert "4/8 samples" in line and "1,500 tokens" in line and line.startswith("▓▓▓▓▓▓▓▓░░░░░░░░")


def test_it_is_redrawn_at_most_four_times_a_second_and_the_last_line_always():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        line = Line("test")
        for i in range(50):
            line.show(f"{i}", i / 50)
        line.end("done", 1.0)
        assert terminal.drawn[0].endswith("0") and terminal.drawn[-1] == "done" and len(terminal.drawn) < 10
        assert terminal.getvalue().endswith("\n")


def test_a_shorter_line_covers_a_longer_one():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        line = Line("test")
        line.show("a long first line")
        line.end("short", 1.0)
        first, last = terminal.getvalue().split("\r")[1:]
        assert len(last.rstrip("\n")) >= len(first)


def test_a_file_gets_no_progress(capsys):
    progress.GenerateProgress(4).close(rollouts())
    out = capsys.readouterr()
    assert out.out == out.err == ""


def test_the_cost_line_says_what_a_rollout_cost():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        view = progress.GenerateProgress(6)
        view.close(rollouts())
        (line,) = terminal.drawn
        assert line.startswith("rollout 6 × ≤6 · ") and line.endswith("· v0")
        assert progress.cost_line(rollouts(), 2.0) == "rollout 6 × ≤6 · 2 s · 10.5 tok/s · v0"


def test_a_rollout_that_failed_leaves_how_far_it_was_and_one_that_was_stopped_its_cost():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        view = progress.GenerateProgress(8)
        view([Progress(values={"finished": 3, "tokens": 9})])
        view.close(None)
        assert re.fullmatch(r"rollout ended · 3/8 samples · [\d.e-]+ s", terminal.drawn[-1])
        view = progress.GenerateProgress(6)
        view.close(rollouts())
        view.close(None)
        assert terminal.drawn[-1].startswith("rollout 6 × ≤6")


def test_a_rollout_that_was_stopped_before_its_first_token_has_a_cost_line():
    import numpy as np

    assert progress.cost_line(rollouts().select(np.zeros(6, bool)), 1.0) == "rollout 0 × ≤0 · 1 s · 0 tok/s"


class Handle:
    """A display of a notebook; `shown` has what was sent."""

    def __init__(self, shown):
        self.shown, self.number = shown, len({number for number, _, _ in shown})

    def display(self, data, raw):
        self.shown.append((self.number, "display", data))

    def update(self, data, raw):
        self.shown.append((self.number, "update", data))


@pytest.fixture
def shown(monkeypatch):
    """What a notebook was sent; `shown.cell` is the cell that runs."""

    class Shown(list):
        cell = 1

    made = Shown()
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress, "_in_cells", {})
    monkeypatch.setattr(progress, "_cell", lambda: made.cell)
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    monkeypatch.setattr("IPython.display.DisplayHandle", lambda: Handle(made))
    return made


def test_a_notebook_gets_one_output_that_is_updated_with_text_beside_the_html(shown):
    line = Line("test")
    line.show("<b>1/2</b>", 0.5)
    line.end("2/2", 1.0)
    (_, first, begin), (_, second, end) = shown
    assert (first, second) == ("display", "update")
    assert begin["text/plain"] == "<b>1/2</b>" and "&lt;b&gt;1/2" in begin["text/html"]
    assert "<progress" in begin["text/html"] and "<progress" not in end["text/html"]


def test_a_loop_of_verbs_leaves_one_line_of_each_kind_in_its_cell(shown):
    for i in range(3):
        line, other = Line("train"), Line("sync")
        line.show(f"{i}", 0.5)
        line.end(f"train {i}", 2.0)
        other.end(f"sync {i}", 0.5)
    assert {number for number, _, _ in shown} == {0, 1}
    last = {number: data["text/plain"] for number, _, data in shown}
    assert last == {0: "train 2 · 3 in this cell, 6 s", 1: "sync 2 · 3 in this cell, 1.5 s"}
    shown.cell = 2
    Line("train").end("train 3", 1.0)
    assert shown[-1][:2] == (2, "display") and shown[-1][2]["text/plain"] == "train 3"


HOSTILE = [
    "<script>alert(1)</script>",
    "\x1b[31mred\x1b[0m",
    "a\u202eb\ud800",
    "</div><img src=x onerror=y>",
    "x" * 9999,
]


class Tags(HTMLParser):
    """The elements of some HTML."""

    def __init__(self, html):
        super().__init__()
        self.seen = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)


@pytest.mark.parametrize("text", HOSTILE)
def test_model_output_in_a_progress_is_inert_and_short(shown, text):
    view = progress.GenerateProgress(total=2)
    view([Progress(values={"finished": 1, "tokens": 9, "first": [text + "\nsecond line"]})])
    (_, _, data), *_ = shown
    html, plain = data["text/html"], data["text/plain"]
    assert Tags(html).seen == ["div", "progress", "div"]
    for sent in (html, plain):
        assert not set("\x1b\u202e\ud800") & set(sent) and len(sent) < 2000
    assert plain.count("\n") == 1, "a sample is one line"
    sent.encode()


def test_a_terminal_gets_no_model_output():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        view = progress.GenerateProgress(total=2)
        view([Progress(values={"finished": 1, "tokens": 9, "first": ["\x1b[2Jcleared"]})])
        assert "cleared" not in terminal.getvalue() and "1/2" in terminal.getvalue()


def test_while_it_generates_the_lengths_of_all_replicas_are_drawn_as_one(shown):
    assert progress.joined_histograms([]) == (1, [])
    told = [{"width": 1, "counts": [0, 1, 2, 3]}, {"width": 4, "counts": [0, 5, 0, 1]}]
    assert progress.joined_histograms(told) == (4, [6, 5, 0, 1])
    view = progress.GenerateProgress(total=20)
    view([Progress(values={"finished": 11, "tokens": 40, "lengths": one}) for one in told])
    assert "lengths 0–15 tok  █▇·▂" in shown[-1][2]["text/plain"]


def test_what_a_replica_told_before_it_was_done_still_counts(shown):
    view = progress.GenerateProgress(total=8)
    one, two = ({"finished": 3, "tokens": 30, "lengths": {"width": 1, "counts": [0, 3]}, "first": ["a"]} for _ in "12")
    view([Progress(values=one), Progress(values=two)])
    view([Progress(values=two)])
    assert shown[-1][2]["text/plain"].startswith("6/8 samples · 60 tokens")
    assert shown[-1][2]["text/plain"].splitlines()[1:] == shown[0][2]["text/plain"].splitlines()[1:]


def test_training_shows_the_micro_batch_all_ranks_reached_and_the_loss_so_far(shown):
    view = progress.TrainProgress("train_step", tokens=400, trained=100)
    view([Progress(values={}), Progress(values={"phase": "forward", "done": 1, "total": 4})])
    assert shown[-1][2]["text/plain"] == "train_step · scoring 1/4"
    ranks = [{"phase": "backward", "done": d, "total": 4, "tokens": 50, "trained": 10, "loss": 0.25} for d in (2, 3)]
    view([Progress(values=values) for values in ranks])
    said = shown[-1][2]["text/plain"]
    assert said.startswith("train_step · micro-batch 2/4 · ") and said.endswith("tok/s · loss ~2.5")
    assert 'value="0.500"' in shown[-1][2]["text/html"]
    view.close(None)
    assert re.fullmatch(r"train_step · ended · micro-batch 2/4 · [\d.e-]+ s", shown[-1][2]["text/plain"])


def test_the_cost_line_of_a_step_says_what_was_measured_and_nothing_else():
    values = {"micro_batches": 16, "padding": 0.0, "peak_bytes": 6.4 * 2**30, "tokens_per_s": 3111.0, "version": 42}
    line = progress.train_cost_line("train_step", values, 5000, 1.9)
    assert line == "train_step · 16 micro-batches · 1.9 s · 3.11k tok/s · padding 0 % · peak 6.4 GiB · v42"
    unmeasured = {"micro_batches": 1, "padding": 0.25, "peak_bytes": None}
    bare = progress.train_cost_line("forward_backward", unmeasured, 500, 2)
    assert bare == "forward_backward · 1 micro-batch · 2 s · 250 tok/s · padding 25 %"
    shared = progress.train_cost_line("train_step", values | {"shared": 0.6}, 5000, 1.9)
    assert "padding 0 % · shared 60 % · peak" in shared
    named = progress.train_cost_line("train_step", values | {"aggregation": "token-mean"}, 5000, 1.9)
    assert named.startswith("train_step · token-mean · 16 micro-batches")
    skipped = progress.train_cost_line("train_step", values | {"skipped": "inf in a gradient"}, 5000, 1.9)
    assert skipped.endswith("v42 · step skipped: inf in a gradient")


def test_the_cost_line_of_a_sync():
    done = {"version": 42, "bytes": 48.2 * 2**20, "transport": "shm", "gap": 1e-6, "tensors": 3}
    assert progress.sync_cost_line(done, 0.031) == "sync v42 · 48.2 MiB · 0.031 s · shm · gap 1e-06"
    assert progress.sync_cost_line(done | {"gap": None}, 0.03).endswith("shm · proof waits for the KV cache")
    with contextlib.redirect_stderr(Terminal()) as terminal:
        view = progress.SyncProgress()
        view([Progress(values={"bytes": 3 << 20}), Progress(values={"bytes": 2 << 20})])
        view.close(done)
        assert terminal.drawn[0].startswith("sync · 3 MiB gathered") and terminal.drawn[1].startswith("sync v42")


def test_verbs_find_their_views_once_installed():
    install()
    assert isinstance(progress_views.make("generate", total=3), progress.GenerateProgress)
    assert isinstance(progress_views.make("train", what="x", tokens=1, trained=1), progress.TrainProgress)
    assert isinstance(progress_views.make("sync"), progress.SyncProgress)
    assert progress_views.make("nothing known") is None
