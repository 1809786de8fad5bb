"""The command line."""

import subprocess
import sys

import pytest

from rlbench import cli
from rlbench._version import __version__


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"rlbench {__version__}"


def test_no_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 2


def test_an_error_of_ours_is_one_line_and_exit_status_1(capsys):
    from rlbench.setup import plan

    other = "gpu" if plan.choose_engine() == "cpu" else "cpu"
    assert cli.main(["setup", "--engine", other]) == 1
    err = capsys.readouterr().err
    assert err.startswith("rlbench setup: ")
    assert err.count("\n") == 1


def test_ps_without_sessions_says_so_and_imports_no_ray(tmp_path):
    code = "import sys; from rlbench import cli; cli.main(['ps']); print(*({'ray', 'torch'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"XDG_STATE_HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[:2] == ["no session is running", ""], done.stderr


def test_stop_without_a_cluster_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert cli.main(["stop"]) == 0
    assert "no cluster" in capsys.readouterr().out
