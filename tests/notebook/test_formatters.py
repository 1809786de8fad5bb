"""In a real IPython shell: our values show as HTML, our errors as one block that ends in what to do."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from rlbench import notebook
from rlbench.data.history import History
from rlbench.data.metrics import Metrics
from rlbench.errors import DataError, Stopped
from tests.data.values import rollouts


@pytest.fixture
def shell():
    made = InteractiveShell.instance()
    notebook.install()
    made.user_ns |= {"rollouts": rollouts(), "DataError": DataError, "Stopped": Stopped}
    yield made
    InteractiveShell.clear_instance()


def batch():
    return rollouts().score(range(6)).batch(lambda rewards, group: rewards)


@pytest.mark.parametrize(
    "value",
    [rollouts, batch, lambda: Metrics({"step": 1, "loss": 0.5}), lambda: History([{"step": 1, "loss": 0.5}])],
    ids=["rollouts", "batch", "metrics", "history"],
)
def test_a_value_shows_as_html_and_keeps_its_text_for_other_readers(shell, value):
    data, _ = shell.display_formatter.format(value())
    assert '<div class="rlb">' in data["text/html"] and data["text/plain"] == repr(value())


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
    result, said = run(shell, capsys, "x = 1\nrollouts.batch(advantage=None)")
    assert isinstance(result.error_in_exec, DataError)
    assert said.splitlines() == [
        f"DataError: {result.error_in_exec}",
        "  cell 1, line 2:   rollouts.batch(advantage=None)",
    ]


def test_a_users_project_may_be_called_like_us(shell, capsys, tmp_path):
    module = tmp_path / "rlbench" / "mine.py"
    module.parent.mkdir()
    module.write_text("def go(rollouts):\n    return rollouts.batch(advantage=None)\n")
    shell.user_ns["source"] = str(module)
    cell = "import runpy\ngo = runpy.run_path(source)['go']\ngo(rollouts)"
    _, said = run(shell, capsys, cell)
    assert said.endswith("mine.py, line 2:   return rollouts.batch(advantage=None)")


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
