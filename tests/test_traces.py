"""Whose line raised: the user's, whatever lies below and above it; and the whole traceback for who asks."""

import json
import linecache
import os
import subprocess
import sys
import textwrap

import pytest

import rlbench as rb
from rlbench import traces
from rlbench.dispatch.failures import remote_error
from rlbench.dispatch.protocol import Failure
from rlbench.errors import DataError, RemoteError
from tests.data.values import rollouts


def raised(work):
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def reads_a_number():
    return json.loads("{")  # mine


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(traces, "_last", traces.Traceback())


def test_the_line_is_the_users_not_that_of_the_library_below_it():
    line = traces.user_line(raised(reads_a_number))
    assert (line.function, line.source) == ("reads_a_number", 'return json.loads("{")  # mine')
    assert str(line).startswith("reads_a_number, ") and f"test_traces.py, line {line.line}:   return json" in str(line)


def test_our_own_frames_and_a_library_alone_are_nobodys_line():
    error = raised(lambda: None.no_such)
    assert traces.user_line(error).function == "<lambda>"
    assert traces.user_line(ValueError()) is None
    inside = raised(lambda: json.loads("{")).__traceback__
    while inside.tb_next is not None:
        inside = inside.tb_next
    assert traces.user_line(ValueError().with_traceback(inside)) is None


def test_a_syntax_error_in_a_users_text_is_where_it_says():
    line = traces.user_line(raised(lambda: compile("a = 1\nif = 2:\n", "mine.py", "exec")))
    assert str(line) == "mine.py, line 2:   if = 2:"


def test_a_projects_file_called_like_us_is_the_users(tmp_path):
    file = tmp_path / "rlbench" / "mine.py"
    file.parent.mkdir()
    file.write_text("def go():\n    return 1 / 0\n")
    names = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert str(traces.user_line(raised(names["go"]))) == f"go, {file}, line 2:   return 1 / 0"


def test_a_path_below_the_current_folder_is_shown_from_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert traces.place(str(tmp_path / "code" / "loss.py")) == "code/loss.py"
    assert traces.place("/elsewhere/loss.py") == "/elsewhere/loss.py"
    assert traces.place("<rank cell 2>") == "<rank cell 2>"


def failure(text, line=None, error=None):
    return Failure("ValueError", "no", text, error, line)


def test_sources_that_only_this_kernel_has_are_put_in(monkeypatch):
    name = "<rank cell 99>"
    monkeypatch.setitem(linecache.cache, name, (9, None, ["a = 1\n", "a / 0\n"], name))
    frames = f'Traceback (most recent call last):\n  File "{name}", line 2, in <module>\nZeroDivisionError: x'
    assert "    a / 0\nZeroDivisionError" in traces.with_sources(frames)
    twice = traces.with_sources(traces.with_sources(frames))
    assert twice.count("a / 0") == 1


def test_ranks_that_fail_alike_are_named_together():
    alike = [("rank 0", failure("Traceback A")), ("rank 2", failure("Traceback A"))]
    error = remote_error([*alike, ("rank 1", failure("Traceback B"))])
    assert isinstance(error, RemoteError) and "raised on rank 0 (and 2 more)" in str(error)
    assert str(rb.last_traceback()) == "rank 0, rank 2:\nTraceback A\n\nrank 1:\nTraceback B"
    assert error.full_traceback == rb.last_traceback()


def test_our_own_errors_of_a_rank_stay_what_they_are_and_keep_their_frames():
    own = DataError("give something else")
    line = traces.UserLine("mine.py", 3, "score", "return x")
    assert remote_error([("rank 1", failure("Traceback C", line, own))]) is own
    assert own.user_line == "score, mine.py, line 3:   return x" and "Traceback C" in own.full_traceback


def test_the_last_traceback_shows_as_it_is_and_says_when_there_is_none():
    assert repr(rb.last_traceback()) == traces.NONE_YET and not rb.last_traceback()
    traces.remember("Traceback\n  two lines")
    assert repr(rb.last_traceback()) == str(rb.last_traceback()) == "Traceback\n  two lines"


def test_a_reward_that_raises_names_the_completion_and_the_line():
    def reward(rollout):
        return {}["no such key"] if rollout.index == 3 else 0.0

    error = raised(lambda: rollouts().score(reward))
    assert isinstance(error, DataError) and "on completion 3" in str(error)
    assert str(error).count('return {}["no such key"]') == 1 and "reward, " in error.user_line
    assert "KeyError: 'no such key'" in rb.last_traceback() and "Traceback" in rb.last_traceback()


def test_an_advantage_that_raises_shows_its_line():
    def advantage(rewards, group):
        return rewards / rewards.no_such_spread  # mine

    error = raised(lambda: rollouts().score(range(6)).batch(advantage=advantage))
    assert isinstance(error, DataError) and "raised AttributeError" in str(error)
    assert str(error).count("return rewards / rewards.no_such_spread  # mine") == 1


SCRIPT = """
from IPython.terminal.interactiveshell import TerminalInteractiveShell
shell = TerminalInteractiveShell.instance(colors="nocolor", simple_prompt=True)
shell.run_cell("import rlbench as rb\\nfrom tests.data.values import rollouts\\nr = rollouts(); rb.Rollouts",
               store_history=True)
shell.run_cell("def reward(rollout):\\n    return rollout.txt  # typo\\nr.score(reward)", store_history=True)
print("-----")
shell.run_cell("print(rb.last_traceback())", store_history=True)
"""


def test_in_a_terminal_the_users_line_shows_once_and_nothing_of_ours(repository):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], cwd=repository, capture_output=True, text=True, timeout=120
    )
    shown, _, rest = done.stdout.partition("-----")
    shown += done.stderr
    assert shown.count("return rollout.txt  # typo") == 1, shown
    assert "reward, cell 2, line 2:   return rollout.txt  # typo" in shown
    assert "Traceback" not in shown and "rollouts.py" not in shown and "site-packages" not in shown
    assert "return rollout.txt  # typo" in rest and "kinds.py" in rest and "NoSuchAttribute" in rest


PLAIN = """
import sys
import rlbench as rb
from tests.data.values import rollouts

def reward(rollout):
    return rollout.txt  # typo

def main():
    rollouts().score(reward)

rb.Rollouts
main()
"""


def test_in_a_plain_script_the_traceback_is_the_scripts_own(repository, tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(PLAIN)

    def said(**more):
        environment = {**os.environ, "PYTHONPATH": str(repository), **more}
        done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        return done.stderr

    short = said()
    assert short.startswith("Traceback") and short.count("File ") == 2 and "in main" in short, short
    assert "return rollout.txt  # typo" in short and "/rlbench/" not in short.replace(str(tmp_path), "")
    full = said(RLBENCH_TRACEBACK="full")
    assert (
        "/rlbench/data/rollouts/scoring.py" in full
        and "/rlbench/rewards/kinds.py" in full
        and "NoSuchAttribute" in full
    )
