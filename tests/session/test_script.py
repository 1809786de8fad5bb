"""Which parts of a cell stand in a script."""

import ast

import pytest

from rlbench.session.record.script import before_line, in_shell, is_plain

CELL = "import math\nx = [\n    1,\n]\nfor i in range(3):\n    math.sqrt(-1)\nlast = 1"


@pytest.mark.parametrize(
    ("line", "ends"), [(6, "]"), (5, "]"), (3, "import math"), (1, ""), (0, ""), (7, "    math.sqrt(-1)")]
)
def test_the_statements_before_one_that_failed(line, ends):
    assert before_line(CELL, line).endswith(ends) and (ends or not before_line(CELL, line))
    assert before_line("%time x\n" + CELL, line) == ""


def test_what_python_alone_does_not_run_is_told_and_run_in_a_shell():
    assert is_plain(CELL)
    odd = ["%matplotlib inline", "!ls", "await pending", "f?", "from __future__ import annotations\nx = 1"]
    for text in [*odd, "x = '''a'''\n%time x", "%time x\\"]:
        assert not is_plain(text) or text in odd[4:]
        call = ast.parse("\n".join(in_shell(text))).body[0].value
        assert ast.literal_eval(call.args[0]).strip("\n") == text
