"""What a record says of a user's code: its name, hash and text, with the helpers it uses."""

import functools
import threading

import pytest
from IPython.core.interactiveshell import InteractiveShell

from rlbench import rl
from rlbench.session.record.sources import MOST, described, source


def helper(x):
    return 2 * x


def mine(x, beta=1.0):
    return beta * helper(x), {}


CELL = """def shaped(x):
    return x + 1
class Scale:
    k = 3
    def __call__(self, x):
        return shaped(x)
"""


class Bonus:
    def __call__(self, x):
        return helper(x)


def test_a_function_comes_with_the_helpers_it_uses_each_once():
    found = described(mine)
    assert found["name"] == "mine" and len(found["hash"]) == 12
    text = found["source"]
    assert text.startswith("def mine(x, beta=1.0):") and text.count("def helper(x):") == 1
    assert "import" not in text and "pytest" not in text


def test_a_value_and_a_bound_parameter_are_told_with_their_class_and_function():
    assert source("grpo") == "grpo"
    standard = described(rl.grpo(clip_high=0.3))
    assert "clip_high=0.3" in standard["source"] and "class" not in standard["source"]
    bonus = described(Bonus())
    assert "class Bonus" in bonus["source"] and "def helper" in bonus["source"]
    assert "def mine" in source(functools.partial(mine, beta=2.0))
    assert described(functools.partial(mine, beta=2.0))["hash"] != described(mine)["hash"]


def test_the_text_of_a_cell_is_found_for_functions_and_for_classes():
    shell = InteractiveShell.instance()
    try:
        shell.run_cell(CELL)
        space = shell.user_ns
        assert source(space["shaped"]) == "def shaped(x):\n    return x + 1"
        text = source(space["Scale"]())
        assert "class Scale:\n    k = 3" in text and "def shaped" in text
    finally:
        InteractiveShell.clear_instance()


def test_what_has_no_text_or_cannot_be_pickled_is_still_described():
    made = eval("lambda x: x + 1")
    assert described(made)["source"] == "" and described(made)["hash"]
    assert described(functools.partial(mine, threading.Lock()))["hash"] == ""


@pytest.mark.parametrize("size", [MOST - 100, MOST + 100])
def test_a_long_text_is_cut_and_says_so(size):
    said = source("x" * size) if size < MOST else source(functools.partial(print, "x" * size))
    assert len(said) < MOST + 60 and ("characters)" in said) == (size > MOST)


def test_a_file_that_was_edited_and_not_reloaded_gives_no_text_rather_than_a_wrong_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "rlb_user_stale.py"
    file.write_text("def one(x):\n    return x\n\ndef two(x):\n    return 2 * x\n")
    import rlb_user_stale  # type: ignore[import-not-found]

    assert source(rlb_user_stale.two) == "def two(x):\n    return 2 * x"
    file.write_text("# a line\n# another\n# and one more\ndef one(x):\n    return x\n")
    assert source(rlb_user_stale.two) == ""
