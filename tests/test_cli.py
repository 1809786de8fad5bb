"""The command line on sessions: `ps`, `logs`, `stop`, `kill`, through the endpoint, and where the monitor is gone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlbench import cli
from rlbench.dispatch.link import Link, shm_prefix
from rlbench.errors import Stopped
from rlbench.monitor import client, logs
from rlbench.runtime import processes, registry
from tests.clock import until
from tests.echo_engine import echo, submit

# -- without a cluster


@pytest.fixture
def state_folder(tmp_path, monkeypatch):
    """A state folder without sessions."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def stranger():
    """A process that nobody recorded, and its start time."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    until(lambda: processes.start_time(process.pid) is not None)
    yield process
    process.kill()
    process.wait()


def describe(name, workers, **fields):
    """The file of a session whose monitor is gone."""
    record = {
        "name": name,
        "cluster": "c",
        "node": "n",
        "epoch": 1,
        "pid": 2**22 - 1,
        "started": 5.0,
        "boot": processes.boot_id(),
        "url": "http://127.0.0.1:9",
        "token": "secret",
        "shm": f"rlb-c-{name}:",
        "workers": workers,
    }
    registry.write_json(registry.session_file(name), record | fields)


def test_ps_of_a_session_whose_monitor_is_gone_names_the_mend_and_no_token(state_folder, capsys):
    describe("lost", {})
    assert cli.main(["ps"]) == 0
    assert "gone: rlbench kill lost" in capsys.readouterr().out
    assert cli.main(["ps", "--json"]) == 0
    said = capsys.readouterr().out
    assert json.loads(said) == [{"name": "lost", "state": "gone", "pid": 2**22 - 1}] and "secret" not in said


def test_killing_a_session_without_monitor_ends_the_recorded_processes_alone(state_folder, stranger, capsys):
    workers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    started = [processes.start_time(worker.pid) for worker in workers]
    describe(
        "lost",
        {
            "rlbench/lost/actor/0": [workers[0].pid, started[0]],
            "rlbench/lost/actor/1": [workers[1].pid, started[1]],
            "rlbench/lost/actor/2": [stranger.pid, 1.0],  # its number is somebody else's by now
        },
    )
    registry.journal_file("lost").write_text("")
    snapshot = registry.snapshot_folder("lost") / "a"
    snapshot.mkdir(parents=True)
    assert cli.main(["kill", "lost"]) == 1, "nobody can be asked here"
    assert all(worker.poll() is None for worker in workers) and "--yes" in capsys.readouterr().err
    assert cli.main(["kill", "lost", "--yes"]) == 0
    assert [worker.wait(120) for worker in workers] == [-15, -15] and stranger.poll() is None
    assert "2 processes ended" in capsys.readouterr().out
    assert not registry.session_file("lost").exists() and not registry.journal_file("lost").exists()
    assert not snapshot.exists()


def test_processes_of_another_boot_are_left_alone(state_folder, stranger):
    started = processes.start_time(stranger.pid)
    describe("old", {"rlbench/old/actor/0": [stranger.pid, started]}, boot="another")
    assert cli.main(["kill", "old", "--yes"]) == 0
    assert stranger.poll() is None and not registry.session_file("old").exists()


@pytest.mark.parametrize(
    "command", [["logs", "nobody"], ["stop", "nobody"], ["kill", "nobody", "--yes"], ["kill", "../x"]]
)
def test_an_unknown_session_is_an_error_that_names_those_there_are(state_folder, capsys, command):
    describe("lost", {})
    assert cli.main(command) == 1
    assert "there are: lost" in capsys.readouterr().err


def test_logs_of_a_cluster_that_others_run_says_where_they_are(state_folder, capsys):
    describe("lost", {"rlbench/lost/actor/0": [1, 1.0]})
    assert cli.main(["logs", "lost"]) == 1
    assert "ray logs" in capsys.readouterr().err
    assert cli.main(["logs", "lost", "--worker", "actr"]) == 1
    assert "nearest: actor/0" in capsys.readouterr().err


def test_a_command_that_nobody_reads_ends_without_a_word():
    command = [sys.executable, "-c", "import sys; from rlbench.cli import main; sys.exit(main(['options']))"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # as head does, once it has its lines
    assert (process.stderr.read(), process.wait()) == (b"", cli.UNREAD)


def test_the_last_lines_of_a_log_are_without_rays_markers(tmp_path):
    path = tmp_path / "worker.out"
    path.write_text(":job_id:01\n:actor_name:Host\n" + "".join(f"line {i}\n" for i in range(9)))
    assert list(logs.last_lines(path, 2)) == ["line 7", "line 8"]
    assert next(iter(logs.last_lines(path, 99))) == "line 0"


def test_ps_imports_neither_ray_nor_torch_where_there_are_sessions(state_folder, tmp_path):
    describe("lost", {})
    code = (
        "import sys; from rlbench import cli; cli.main(['ps']); print(*({'ray', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"XDG_STATE_HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "", done.stdout + done.stderr


# -- on a cluster


@pytest.fixture
def link(cluster, request):
    made = Link.create(f"cli-{abs(hash(request.node.name)) % 10**8}")
    yield made
    made.close()


@pytest.mark.engine
def test_ps_shows_what_runs_and_stop_ends_it(link, capsys):
    host, _ = echo(link)
    pending = submit(link, host, "slowly", 120.0, what="rollout 8", track=True)
    until(lambda: client.ask(client.find(link.name), "/state")["running"])
    assert cli.main(["ps"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(link.name)]
    assert "rollout 8" in line and f"script {os.getpid()}" in line
    assert re.search(r" \d+ (B|MiB) ", line)
    assert cli.main(["ps", "--json"]) == 0
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["name"] == link.name]
    assert row["running"] == ["rollout 8"] and row["driver"]["alive"] and row["lease_left_s"] is None
    assert cli.main(["stop", link.name]) == 0
    assert capsys.readouterr().out == "stopping rollout 8\n"
    with pytest.raises(Stopped):
        pending.result(timeout=60)
    until(lambda: not link.state()["running"])
    capsys.readouterr()
    assert cli.main(["stop", link.name]) == 0
    assert capsys.readouterr().out == "nothing runs\n"


@pytest.mark.engine
def test_logs_show_what_a_worker_printed(link, capsys):
    host, pid = echo(link)
    submit(link, host, "shout", "written by the worker").result()
    capsys.readouterr()

    def said(*options):
        assert cli.main(["logs", link.name, *options]) == 0
        return capsys.readouterr().out

    until(lambda: "written by the worker" in said())
    shown = said("--worker", "echo", "-n", "1")
    assert shown.splitlines()[0] == f"== echo/0 (pid {pid}) out" and "written by the worker" in shown


@pytest.mark.engine
def test_kill_closes_a_session_through_its_monitor(cluster, capsys):
    made = Link.create("cli-killed")
    _, pid = echo(made)
    assert cli.main(["kill", "cli-killed", "--yes"]) == 0
    assert capsys.readouterr().out == "cli-killed: closed\n"
    until(lambda: processes.start_time(pid) is None)
    assert not registry.session_file("cli-killed").exists()
    made.release()


@pytest.mark.engine
def test_kill_ends_a_session_whose_monitor_ended_for_good(cluster, capsys):
    import ray

    made = Link.create("cli-lost")
    _, pid = echo(made)
    until(lambda: client.find("cli-lost")["workers"])
    staged = Path("/dev/shm") / f"{shm_prefix('cli-lost')}actor-0"
    staged.write_bytes(b"weights")
    monitor = client.find("cli-lost")["pid"]
    ray.kill(made.monitor)
    until(lambda: processes.start_time(monitor) is None)
    assert cli.main(["kill", "cli-lost", "--yes"]) == 0
    assert "its monitor was gone: 1 processes ended" in capsys.readouterr().out
    until(lambda: processes.start_time(pid) is None)
    assert not staged.exists() and not registry.session_file("cli-lost").exists()
    made.release()
