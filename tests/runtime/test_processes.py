"""Processes by identity: a number that was given again is another process, and only our own sessions are ended."""

import os
import signal
import subprocess
import sys

import pytest

from rlbench.runtime import processes


@pytest.fixture
def tree():
    """A process with a child, both in a session of their own; the leader ignores SIGTERM."""
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    leader = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    yield leader, int(leader.stdout.readline())
    leader.kill()
    leader.wait()


def test_a_whole_session_ends_also_what_ignores_a_polite_request(tree):
    leader, child = tree
    assert sorted(processes.session_members(leader.pid)) == sorted([leader.pid, child])
    processes.end_session(leader.pid, grace_s=0.2)
    assert processes.session_members(leader.pid) == []
    assert leader.wait() == -signal.SIGKILL


def test_a_session_without_its_leader_ends_too(tree):
    leader, child = tree
    leader.kill()
    leader.wait()
    assert processes.session_members(leader.pid) == [child]
    processes.end_session(leader.pid)
    assert processes.start_time(child) is None


@pytest.mark.parametrize("session", [0, 1, -1, os.getsid(0)])
def test_a_session_that_is_not_one_we_started_is_refused(session):
    with pytest.raises(ValueError, match="refusing to end process session"):
        processes.end_session(session)


def test_a_process_is_the_same_until_it_ends_and_never_again():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = processes.start_time(process.pid)
    assert processes.is_same(process.pid, started) and not processes.is_same(process.pid, started - 1)
    process.kill()
    process.wait()
    assert not processes.is_same(process.pid, started) and processes.start_time(process.pid) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_another_user_made_under_our_names_is_not_swept(tmp_path):
    for name in ("rlb-1-own", "rlb-1-theirs", "rlb-2-own"):
        (tmp_path / name).write_text("")
    os.chown(tmp_path / "rlb-1-theirs", 65534, 65534)
    processes.sweep(tmp_path, "rlb-1-")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rlb-1-theirs", "rlb-2-own"]


def test_a_zombie_does_not_live():
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()  # it has ended; nobody has asked for its status yet
    while processes.start_time(process.pid) is not None:
        pass
    assert os.path.exists(f"/proc/{process.pid}")
    assert processes.memory_bytes(process.pid) is None, "a killed worker did not hold 0 bytes when last seen"
    process.wait()


def test_resident_memory_is_measured_and_none_where_the_process_is_gone(tree):
    leader, _ = tree
    assert 1 << 20 < processes.memory_bytes(leader.pid)[0] < 1 << 30
    leader.kill()
    leader.wait()
    assert processes.memory_bytes(leader.pid) is None
