"""Values find who draws them, also where nobody imported the room that does."""

import subprocess
import sys
import textwrap

import pytest

from rlbench.data.base import drawing
from rlbench.errors import DataError


def run(code):
    script = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(script, capture_output=True, text=True, check=True).stdout


@pytest.fixture(autouse=True)
def painters(monkeypatch):
    monkeypatch.setattr(drawing, "_painters", dict(drawing._painters))


def test_a_registered_painter_gets_all_arguments():
    drawing.register("digits", "builtins:int")
    assert drawing.drawn("digits", "ff", base=16) == 255


def test_a_script_that_imported_the_values_alone_finds_the_notebook_room():
    said = run("""
        import sys
        from rlbench.data.record.history import History
        assert "rlbench.notebook" not in sys.modules
        print(type(History([{"step": 1, "reward": 1.0}]).plot()).__name__)
        assert "torch" not in sys.modules and "ray" not in sys.modules and "plotly" not in sys.modules
    """)
    assert said == "Chart\n"


def test_what_nobody_draws_is_refused_naming_what_is_drawn():
    with pytest.raises(DataError, match="history_plot"):
        drawing.drawn("a face")


def test_a_missing_package_is_named_with_how_to_get_it():
    drawing.register("with it", "no_such_package_here.part:paint")
    with pytest.raises(DataError, match="pip install no_such_package_here"):
        drawing.drawn("with it")
