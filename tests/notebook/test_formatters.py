"""In a real IPython shell: our values show as HTML, our errors as one block that ends in what to do."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from rlbench import notebook
from rlbench.data.record.history import History
from rlbench.data.record.metrics import Metrics
from rlbench.engines import InferenceEngine, TrainEngine
from rlbench.errors import DataError, Stopped
from rlbench.notebook.cards import data_views, record_views, result_views, session_views
from rlbench.results import Saved
from rlbench.session.record.evaluations import PastEvaluations
from rlbench.session.session import Sessions
from rlbench.session.state.healing import Healed
from rlbench.session.state.snapshots import Snapshots
from rlbench.session.training.evaluation import Evaluation, Evaluations
from tests.data.values import rollouts
from tests.notebook import gallery
from tests.notebook.reading import Typeset


@pytest.fixture
def shell():
    InteractiveShell.clear_instance()  # of an earlier test: a terminal's shell shows no HTML
    made = InteractiveShell.instance()
    notebook.install()
    made.user_ns |= {"rollouts": rollouts(), "DataError": DataError, "Stopped": Stopped}
    yield made
    InteractiveShell.clear_instance()


def batch():
    return rollouts().score(range(6)).batch(lambda rewards, group: rewards)


def test_rollouts_show_as_html_and_keep_their_text_for_other_readers(shell):
    data, _ = shell.display_formatter.format(rollouts())
    assert '<div class="rlb ' in data["text/html"] and data["text/plain"] == repr(rollouts())


CARDS = {
    "batch": (batch, data_views.batch_card),
    "metrics": (lambda: Metrics({"step": 1, "loss": 0.5}), record_views.metrics_card),
    "history": (lambda: History([{"step": 1, "loss": 0.5}]), record_views.history_card),
    "evaluation": (lambda: Evaluation(0.5, rollouts().score([1.0] * 6)), result_views.evaluation_card),
    "evaluations": (
        lambda: Evaluations({"a": Evaluation(0.5, rollouts().score([1.0] * 6), "a")}),
        result_views.evaluations_card,
    ),
    "past": (lambda: PastEvaluations([], {}), result_views.past_evaluations_card),
    "checkpoint": (lambda: Saved("/x", 1, ()), result_views.saved_card),
    "snapshots": (lambda: Snapshots([]), result_views.snapshots_card),
    "healed": (lambda: Healed({}, 1, 1), result_views.healed_card),
    "sessions": (lambda: Sessions([{"name": "a", "pid": 1}]), session_views.sessions_card),
}


@pytest.mark.parametrize(("make", "card"), CARDS.values(), ids=CARDS)
def test_a_card_shows_as_html_and_says_the_same_as_text(shell, make, card):
    data, _ = shell.display_formatter.format(make())
    assert data == card(make()).bundle() and set(data) == {"text/html", "text/plain"}


@pytest.mark.parametrize(("make", "card"), CARDS.values(), ids=CARDS)
def test_in_a_list_a_value_shows_its_one_line(shell, make, card):
    data, _ = shell.display_formatter.format({"a": make()})
    assert data["text/plain"].replace(" ", "") == ("{'a':" + repr(make()) + "}").replace(" ", "")


def test_an_engine_of_either_kind_shows_a_card_and_is_asked_nothing(shell):
    data, _ = shell.display_formatter.format(InferenceEngine("/nowhere"))
    assert data == session_views.engine_card(InferenceEngine("/nowhere")).bundle()
    assert repr(InferenceEngine("/nowhere")) == "InferenceEngine('inference', vllm, '/nowhere', not built)"
    assert repr(TrainEngine(None)) == "TrainEngine('actor', fsdp2, not built)"
    assert "not built" in shell.display_formatter.format(TrainEngine(None))[0]["text/plain"]


def test_installing_twice_and_outside_of_ipython_is_harmless(shell):
    notebook.install()
    InteractiveShell.clear_instance()
    notebook.install()
    data, _ = shell.display_formatter.format(rollouts())
    assert "text/html" in data


def run(shell, capsys, cell):
    result = shell.run_cell(cell, store_history=True)  # as a person's cell: it has a number
    out = capsys.readouterr()
    return result, (out.out + out.err).strip()


def test_our_error_is_one_block_with_the_users_line_and_none_of_our_frames(shell, capsys):
    result, said = run(shell, capsys, "x = 1\nrollouts.batch(advantage=7)")
    assert isinstance(result.error_in_exec, DataError)
    assert said.splitlines() == [
        f"DataError: {result.error_in_exec}",
        "  cell 1, line 2:   rollouts.batch(advantage=7)",
    ]


def test_a_users_project_may_be_called_like_us(shell, capsys, tmp_path):
    module = tmp_path / "rlbench" / "mine.py"
    module.parent.mkdir()
    module.write_text("def go(rollouts):\n    return rollouts.batch(advantage=7)\n")
    shell.user_ns["source"] = str(module)
    cell = "import runpy\ngo = runpy.run_path(source)['go']\ngo(rollouts)"
    _, said = run(shell, capsys, cell)
    assert said.endswith("mine.py, line 2:   return rollouts.batch(advantage=7)")


def test_a_stopped_verb_is_one_line_that_points_at_what_was_finished(shell, capsys):
    _, said = run(shell, capsys, "raise Stopped('rollout 8 stopped', partial=[1])")
    assert said == "Stopped: rollout 8 stopped (.partial holds what there was)"
    _, said = run(shell, capsys, "raise Stopped('train_step stopped')")
    assert said == "Stopped: train_step stopped"


def test_a_stopped_verb_ends_a_loop(shell, capsys):
    shell.run_cell("seen = []\nfor i in range(3):\n    seen.append(i)\n    raise Stopped('rollout')")
    assert shell.user_ns["seen"] == [0]


def test_other_errors_show_as_ever(shell, capsys):
    _, said = run(shell, capsys, "1 / 0")
    assert "Traceback" in said and "ZeroDivisionError" in said


@pytest.mark.parametrize("name", [name for name in gallery.VIEWS if name != "dashboard"])
def test_no_text_of_a_view_becomes_a_formula(shell, name, monkeypatch):
    """Defect absent: what stands between two dollars of a completion was typeset as mathematics."""
    shown = []
    shell.kernel = type("Kernel", (), {})()
    monkeypatch.setattr(shell.display_pub, "publish", lambda data, **_: shown.append(data))
    gallery.show(name)
    htmls = [data["text/html"] for data in shown if "text/html" in data]
    assert htmls and all(Typeset(html).text == "" for html in htmls)
