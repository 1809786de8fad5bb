"""`scripts/run_notebook.py`, which `make demo` runs."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_notebook.py"


def run(tmp_path: Path, *sources: str, show: str = "") -> subprocess.CompletedProcess[str]:
    """Run a notebook of these cells, the last tagged `curve`; it is written to `tmp_path/out/done.ipynb`."""
    cells = [new_code_cell(source) for source in sources]
    cells[-1].metadata["tags"] = ["curve"]
    nbformat.write(new_notebook(cells=cells), tmp_path / "book.ipynb")
    command = [
        sys.executable,
        str(SCRIPT),
        "book.ipynb",
        "out/done.ipynb",
        *(["--show", show] if show else []),
    ]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)


@pytest.mark.slow
def test_cells_run_in_order_their_text_is_shown_and_the_tagged_one_again_at_the_end(tmp_path):
    done = run(
        tmp_path,
        "x = 2; y = '10 ' + '%'\nprint(y + chr(13) + 'whole')",
        "print('curve', x + 1)",
        show="curve",
    )
    assert done.returncode == 0, done.stderr
    assert "\nwhole\n" in done.stdout
    assert "10 %" not in done.stdout
    assert done.stdout.rstrip().endswith("curve 3")
    assert done.stdout.count("curve 3") == 2
    executed = nbformat.read(tmp_path / "out" / "done.ipynb", as_version=4)
    assert executed.cells[1].outputs[0].text == "curve 3\n"
    assert "widgets" not in executed.metadata


@pytest.mark.slow
def test_a_failing_cell_ends_the_run_with_status_1_and_is_kept_in_the_executed_notebook(tmp_path):
    done = run(tmp_path, "print('before')", "1 / 0", "print('never')")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "\nnever" not in done.stdout
    executed = nbformat.read(tmp_path / "out" / "done.ipynb", as_version=4)
    assert executed.cells[1].outputs[0].ename == "ZeroDivisionError"


def test_a_notebook_that_is_not_there_is_named(tmp_path):
    command = [sys.executable, str(SCRIPT), "absent.ipynb", "out.ipynb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "there is no absent.ipynb" in done.stderr
