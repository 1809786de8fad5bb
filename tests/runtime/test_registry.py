"""The state folder: private, written whole, and honest about files it cannot read."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from rlbench.errors import ClusterError
from rlbench.runtime import cluster, guard, processes, registry
from tests.runtime.kernels import Kernel, Refused


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "rlbench"


def record(**changes):
    made = registry.ClusterRecord(
        id="abcd1234",
        address="127.0.0.1:9",
        guard_pid=2**22 + 1,
        guard_start=1.0,
        ray_session=2**22 + 2,
        ray_start=2.0,
        boot=processes.boot_id(),
        temp_dir="nowhere",
        token_path="none",
        devices=2,
        gpus=0,
    )
    return replace(made, **changes)


def modes(folder):
    return {path.name: oct(path.stat().st_mode & 0o777) for path in folder.rglob("*")}


def test_only_its_owner_can_read_it(state):
    registry.write_cluster(record())
    registry.token_file()
    registry.write_json(registry.session_file("demo"), {"name": "demo"})
    with registry.locked():
        pass
    assert oct(state.stat().st_mode & 0o777) == "0o700"
    assert modes(state) == {
        "sessions": "0o700",
        "cluster.json": "0o600",
        "token": "0o600",
        "lock": "0o600",
        "demo.json": "0o600",
    }


def test_a_folder_somebody_opened_up_is_closed_again(state):
    state.mkdir()
    state.chmod(0o755)
    registry.state_dir()
    assert oct(state.stat().st_mode & 0o777) == "0o700"


def test_a_folder_in_which_others_may_have_put_something_is_not_used(state):
    state.mkdir()
    state.chmod(0o777)
    with pytest.raises(ClusterError, match="XDG_STATE_HOME"):
        registry.token_file()
    assert list(state.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_not_used(state):
    state.mkdir(mode=0o700)
    os.chown(state, 65534, 65534)
    with pytest.raises(ClusterError, match="XDG_STATE_HOME"):
        registry.token_file()


def test_a_cluster_is_found_as_it_was_written_and_forgotten_with_its_sessions(state):
    registry.write_cluster(record())
    for name, cluster_id in (("mine", "abcd1234"), ("other", "ffff0000")):
        registry.write_json(registry.session_file(name), {"name": name, "cluster": cluster_id})
        registry.journal_file(name).write_text("")
    assert registry.read_cluster() == record()
    assert [s["name"] for s in registry.live_sessions("abcd1234")] == ["mine"]
    registry.forget_cluster("abcd1234")
    assert registry.read_cluster() is None
    assert sorted(p.name for p in (state / "sessions").iterdir()) == ["other.journal", "other.json"]


def test_a_session_half_forgotten_can_still_be_named(state, monkeypatch):
    def cut_off(*args, **kwargs):
        raise KeyboardInterrupt

    registry.write_json(registry.session_file("large"), {"name": "large", "cluster": "abcd1234"})
    monkeypatch.setattr(registry.shutil, "rmtree", cut_off)
    with pytest.raises(KeyboardInterrupt):
        registry.forget_session("large")
    assert [s["name"] for s in registry.live_sessions()] == ["large"]


def test_forgetting_an_older_cluster_leaves_the_present_one():
    registry.write_cluster(record())
    registry.forget_cluster("ffff0000")
    assert registry.read_cluster() == record()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "abcd"}', '{"unknown": 1}'])
def test_a_record_that_cannot_be_read_is_no_cluster(state, text):
    registry.state_dir()
    (state / "cluster.json").write_text(text)
    assert registry.read_cluster() is None


def test_a_reader_sees_the_old_file_or_the_new_one(state):
    registry.state_dir()
    path = state / "value.json"
    registry.write_json(path, {"n": 1})
    before = path.open()
    registry.write_json(path, {"n": 2})
    assert json.load(before) == {"n": 1} and registry.read_json(path) == {"n": 2}
    before.close()
    assert [p.name for p in state.glob("*value*")] == ["value.json"]


WRITES = """
import gc, sys
from pathlib import Path
from rlbench.runtime import registry
value = {"name": "demo", "workers": {f"rlbench/demo/actor/{i}": [i, 0.5] for i in range(4)}}
registry.write_json(Path("first.json"), value)
gc.collect()
gc.disable()
registry.write_json(Path("demo.json"), value)
left = gc.collect()
assert registry.read_json(Path("demo.json")) == value
sys.exit(f"{left} objects for the collector" if left else 0)
"""


def test_a_file_is_written_without_work_for_the_garbage_collector(tmp_path):
    # in a process without other threads, whose garbage would count
    done = subprocess.run([sys.executable, "-c", WRITES], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def test_the_token_is_made_once_and_long():
    first = registry.token_file().read_text()
    assert registry.token_file().read_text() == first and len(first) == 64


def test_a_lock_held_elsewhere_is_waited_for_and_its_holder_named():
    code = "from rlbench.runtime import registry\nwith registry.locked():\n    print('held', flush=True)\n    input()\n"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with pytest.raises(ClusterError, match=rf"pid {other.pid}\) has held"):
        with registry.locked(timeout_s=0.2):
            pass
    other.kill()
    other.wait()
    with registry.locked(timeout_s=10):
        pass  # a dead holder holds nothing


@pytest.mark.parametrize("change", ["boot", "leader"])
def test_processes_that_got_the_numbers_of_a_gone_cluster_are_left_alone(change, tmp_path):
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    started = processes.start_time(stranger.pid)
    old = {
        "boot": record(ray_session=stranger.pid, ray_start=started, boot="another boot"),
        "leader": record(ray_session=stranger.pid, ray_start=started - 1),
    }[change]
    left = tmp_path / "rlb-temp"
    left.mkdir()
    registry.write_cluster(replace(old, temp_dir=str(left)))
    cluster.stop_cluster(registry.read_cluster())
    assert stranger.poll() is None and registry.read_cluster() is None and not left.exists()
    stranger.kill()
    stranger.wait()


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:99999", "auto"])
def test_an_address_where_nobody_answers_is_one_sentence_before_ray_is_asked(address, tmp_path):
    kernel = Kernel(tmp_path)  # this process may have joined a cluster
    wanted = rf"ClusterError: nothing answers at {address}: .*host:port.*rb\.init\(\)"
    with pytest.raises(Refused, match=wanted) as refused:
        kernel.run(f"import sys, rlbench as rb\nrb.init(address={address!r})")
    assert "\n" not in str(refused.value)
    assert not kernel.run("out = 'ray' in sys.modules")
    kernel.end()


def test_a_port_beyond_the_last_one_is_nobodys():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert guard.answers(f"127.0.0.1:{port}") and not guard.answers(f"127.0.0.1:{port + 65536}")


def test_a_cluster_without_devices_is_refused_before_anything_starts(state):
    with pytest.raises(ClusterError, match="devices=0"):
        cluster.init(devices=0)
    assert not state.exists()


def test_a_parked_session_is_listed_until_it_is_forgotten_and_not_while_it_runs(state):
    folder = registry.parked_folder("older")
    folder.mkdir(parents=True)
    assert registry.parked("older") == {"name": "older", "state": "parked", "path": str(folder)}, "damaged, and there"
    registry.write_json(folder / registry.ABOUT, {"step": 3, "name": "another"})
    assert [(one["name"], one["step"]) for one in registry.parked_sessions()] == [("older", 3)]
    registry.write_json(registry.session_file("older"), {})
    assert registry.parked("older") is None and registry.parked_sessions() == []
    registry.session_file("older").unlink()
    half_gone = registry.parked_root(".older.abc.dropped")
    half_gone.mkdir()
    registry.forget_parked("older")
    registry.forget_parked("older")
    assert registry.parked_sessions() == [] and not half_gone.exists()
