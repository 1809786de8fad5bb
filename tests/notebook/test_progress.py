"""The progress line: redrawn in place, at most four times a second, and the cost line that stays."""

import contextlib
import io

from rlbench.dispatch import views as progress_views
from rlbench.dispatch.protocol import Progress
from rlbench.notebook import install, progress
from tests.data.values import rollouts


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self):
        return True

    @property
    def drawn(self):
        return [line.rstrip() for line in self.getvalue().split("\r")[1:]]


def test_progress_is_summed_over_replicas():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        view = progress.GenerateProgress(total=8)
        view(
            [
                Progress(True, values={"finished": 1, "tokens": 600}),
                Progress(True, values={"finished": 3, "tokens": 900}),
            ]
        )
        (line,) = terminal.drawn
        assert "4/8 samples" in line and "1,500 tokens" in line and line.startswith("▓▓▓▓▓▓▓▓░░░░░░░░")


def test_it_is_redrawn_at_most_four_times_a_second_and_the_last_line_always():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        line = progress.Line()
        for i in range(50):
            line.show(f"{i}", i / 50)
        line.show("done", final=True)
        assert terminal.drawn[0].endswith("0") and terminal.drawn[-1] == "done" and len(terminal.drawn) < 10
        assert terminal.getvalue().endswith("\n")


def test_a_shorter_line_covers_a_longer_one():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        line = progress.Line()
        line.show("a long first line")
        line.show("short", final=True)
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
        assert progress.cost_line(rollouts(), 2.0) == "rollout 6 × ≤6 · 2.0 s · 10 tok/s · v0"


def test_a_rollout_that_was_stopped_before_its_first_token_has_a_cost_line():
    import numpy as np

    assert progress.cost_line(rollouts().select(np.zeros(6, bool)), 1.0) == "rollout 0 × ≤0 · 1.0 s · 0 tok/s"


def test_what_needs_no_preparing_leaves_no_line():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        view = progress.PrepareProgress("making the model 'tiny'")
        view.close(None)
        assert terminal.getvalue() == ""
        view.report(3, 10)
        view.close(None)
        assert terminal.drawn[0].endswith("making the model 'tiny': 3/10")
        assert "making the model 'tiny' · 0 s" in terminal.drawn[-1]


def test_a_notebook_gets_one_output_that_is_updated_with_text_beside_the_html(monkeypatch):
    shown = []

    class Handle:
        def display(self, data, raw):
            shown.append(("display", data))

        def update(self, data, raw):
            shown.append(("update", data))

    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.DisplayHandle", Handle)
    line = progress.Line()
    line.show("<b>1/2</b>", 0.5)
    line.show("2/2", 1.0, final=True)
    (first, begin), (second, end) = shown
    assert (first, second) == ("display", "update")
    assert begin["text/plain"] == "<b>1/2</b>" and "&lt;b&gt;1/2" in begin["text/html"]
    assert "<progress" in begin["text/html"] and "<progress" not in end["text/html"]


def test_verbs_find_their_views_once_installed():
    install()
    assert isinstance(progress_views.make("generate", total=3), progress.GenerateProgress)
    assert isinstance(progress_views.make("prepare", what="x"), progress.PrepareProgress)
    assert progress_views.make("nothing known") is None
