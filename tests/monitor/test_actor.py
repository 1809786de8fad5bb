"""The monitor as a process: it survives its own death, outlives its driver as long as it should, and cleans up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlbench.dispatch import link as links
from rlbench.dispatch.link import Link, shm_prefix
from rlbench.errors import SessionError, Stopped
from rlbench.monitor import client
from rlbench.runtime import processes, registry
from tests.clock import LIMIT_S, until
from tests.echo_engine import echo, submit

pytestmark = pytest.mark.engine


@pytest.fixture
def link(cluster):
    """A session of a test's own, whose worker dies or whose driver is replaced."""
    made = Link.create("monitor-own")
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(cluster):
    """A session and its one worker, which tests leave alive, and driven from here."""
    made = Link.create("monitor-shared")
    yield made, echo(made)[0]
    made.close()


def test_rollouts_from_many_threads_have_numbers_of_their_own(shared):
    from concurrent.futures import ThreadPoolExecutor

    link, _ = shared
    with ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(lambda _: link.next_rollout(), range(64)))
    assert sorted(numbers) == list(range(1, 65)) and link.state("rollouts")["rollouts"] == 64


def test_a_killed_monitor_comes_back_with_its_state_and_its_driver_goes_on(shared):
    link, host = shared
    link.set(step=5, version=4)
    link.apply({"do": "record", "record": {"step": 5, "reward": 0.5}})
    before = link.state()
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: not Path(f"/proc/{before['pid']}").exists())
    after = link.state()
    assert after["pid"] != before["pid"]
    for name in ("step", "version", "history", "engines", "epoch", "driver"):
        assert after[name] == before[name], name
    link.set(step=6)
    assert link.state()["step"] == 6 and submit(link, host, "shout", "on").result() == "ON"
    assert registry.read_json(registry.session_file(link.name))["pid"] == after["pid"]


def test_a_monitor_that_lives_and_does_not_answer_is_named_and_asked_again(shared, monkeypatch):
    link, _ = shared
    link.set(step=3)
    monitor = link.state()["pid"]
    os.kill(monitor, signal.SIGSTOP)
    try:
        monkeypatch.setattr(links, "MONITOR_LIMIT_S", 0.5)
        with pytest.raises(SessionError, match="has not answered"):
            link.state()
    finally:
        os.kill(monitor, signal.SIGCONT)
        monkeypatch.undo()
    assert link.state()["step"] == 3


def test_an_event_it_cannot_apply_is_refused_and_does_not_spoil_its_journal(shared):
    import ray

    link, _ = shared
    link.set(step=1)
    with pytest.raises(ray.exceptions.RayTaskError, match="unknown event"):
        link.apply({"do": "dance"})
    os.kill(link.state()["pid"], signal.SIGKILL)
    link.set(step=link.state()["step"] + 1)
    assert link.state()["step"] == 2


def test_samples_hold_the_resident_memory_of_the_workers_that_live(link):
    _, pid = echo(link)
    name = f"rlbench/{link.name}/echo/0"
    until(lambda: any(name in s["resident"] for s in link.samples()))
    sample = next(s for s in reversed(link.samples()) if name in s["resident"])
    measured = processes.memory_bytes(pid)[0]
    assert 0.5 < sample["resident"][name] / measured < 2
    assert link.samples(since=time.time() + 60) == []
    until(lambda: len(link.samples()) > 2)
    (newest,) = link.samples(last=1)
    assert newest["time"] >= sample["time"] and link.samples(last=0) == []
    os.kill(pid, signal.SIGKILL)
    now = time.time()
    until(lambda: any(s["time"] > now + 0.5 and name not in s["resident"] for s in link.samples(now)))


def test_a_running_call_shows_until_it_ends(shared):
    link, host = shared
    pending = submit(link, host, "slowly", 30.0, what="rollout 8", track=True)
    until(lambda: list(link.state()["running"].values()) == ["rollout 8"])
    assert link.stop_running() == ["rollout 8"]
    until(lambda: pending.done)
    until(lambda: not link.state()["running"])


def test_a_call_whose_worker_died_no_longer_runs(link):
    host, pid = echo(link)
    submit(link, host, "slowly", 60.0, track=True)
    until(lambda: link.state()["running"])
    os.kill(pid, signal.SIGKILL)
    until(lambda: not link.state()["running"])


def test_a_call_the_worker_refused_no_longer_runs(link):
    import ray

    host, _ = echo(link)
    taken = Link.attach(link.name, take_over=True)
    ray.get(host.adopt.remote(taken.epoch))
    with pytest.raises(SessionError, match="another notebook"):
        submit(link, host, "shout", "x", track=True).result()
    until(lambda: not taken.state()["running"])
    taken.close()


def test_after_a_control_verb_the_driver_goes_on_under_a_new_epoch(shared):
    import ray

    link, host = shared
    before = link.epoch
    ray.get(host.adopt.remote(before + 1))  # what a control verb's epoch does to the workers
    first, second = (submit(link, host, "shout", word, track=True) for word in ("go", "on"))
    assert (second.result(), first.result()) == ("ON", "GO") and link.epoch > before
    link.set(step=7)
    assert link.state()["driver"]["pid"] == os.getpid()
    until(lambda: not link.state()["running"])


def test_a_call_sent_meanwhile_waits_for_the_control_verb(shared, monkeypatch):
    import ray

    link, host = shared
    renew, asked = link._renew, []

    def later(stale):
        asked.append(stale)
        return len(asked) > 2 and renew(stale)

    monkeypatch.setattr(link, "_renew", later)
    ray.get(host.adopt.remote(link.epoch + 1))
    pending = submit(link, host, "shout", "at last")
    until(lambda: pending.done)
    assert pending.result() == "AT LAST" and len(asked) == 3


def test_a_call_that_waits_for_a_control_verb_can_be_stopped(shared, monkeypatch):
    import ray

    link, host = shared
    monkeypatch.setattr(link, "_renew", lambda stale: False)
    ray.get(host.adopt.remote(link.epoch + 1))
    pending = submit(link, host, "shout", "never")
    with pytest.raises(TimeoutError):
        pending.result(timeout=0.5)
    pending.stop()
    with pytest.raises(Stopped):
        pending.result(timeout=LIMIT_S)


def test_a_driver_that_lives_is_not_displaced_unless_told_to(cluster, link):
    code = (
        "import sys, rlbench as rb\n"
        "from rlbench.dispatch.link import Link\n"
        "rb.init()\n"
        "try:\n"
        "    Link.attach(sys.argv[1])\n"
        "except rb.errors.SessionError as error:\n"
        "    print(error)\n"
        "print(Link.attach(sys.argv[1], take_over=True).epoch)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, link.name], capture_output=True, text=True, timeout=120
    ).stdout.splitlines()
    assert f"driven by pid {os.getpid()} (script)" in said[0] and "take_over=True" in said[0]
    assert int(said[1]) == link.epoch + 1
    assert registry.read_json(registry.session_file(link.name))["epoch"] == link.epoch + 1
    with pytest.raises(SessionError, match="another notebook"):
        link.set(step=1)


def test_closing_a_session_removes_all_that_was_its_own(cluster):
    import ray

    made, neighbour = Link.create("closing"), Link.create("closing-b")
    placement = ray.util.placement_group([{"CPU": 0.01}], name="rlbench/closing/place", lifetime="detached")
    _, pid = echo(made)
    made.engine("echo", {"placements": ["rlbench/closing/place"]})
    files = [Path("/dev/shm") / f"{shm_prefix(link.name)}actor-0" for link in (made, neighbour)]
    for file in files:
        file.write_bytes(b"weights of a rank that was killed")
    monitor = made.state()["pid"]
    made.close()
    made.close()
    until(lambda: processes.start_time(pid) is None and processes.start_time(monitor) is None)
    assert not registry.session_file("closing").exists() and not registry.journal_file("closing").exists()
    assert ray.util.placement_group_table(placement)["state"] == "REMOVED"
    assert [file.exists() for file in files] == [False, True]
    with pytest.raises(SessionError, match="closed"):
        made.submit("echo", [], [], "shout", [], list)
    neighbour.close()
    assert not files[1].exists()


def test_a_closed_session_stays_closed_whatever_its_monitor_still_sees(cluster, monkeypatch):
    """Between the end of the workers and its own a monitor saw them dead, and wrote the session's file once more."""
    from rlbench.monitor import actor  # it imports Ray, which must know the cluster's token first

    monkeypatch.setattr(actor, "_end", lambda name: None)  # it lives on, so that it has all the time to see it
    monitor = actor.Monitor("closed", cluster.id, "rlb-closed:")
    worker = {"kind": "train", "info": {}, "actors": ["rlbench/closed/echo/0"], "pids": {"rlbench/closed/echo/0": 0}}
    monitor.apply(0, {"do": "engine", "name": "echo", "fields": worker})
    assert monitor.close() and monitor.close()
    with pytest.raises(SessionError, match="closed"):
        monitor.apply(0, {"do": "set", "key": "step", "value": 1})
    monitor._note_dead({"rlbench/closed/echo/0"})
    assert not registry.session_file("closed").exists() and not registry.journal_file("closed").exists()


def test_the_sessions_file_is_written_where_processes_change(cluster, monkeypatch):
    from rlbench.monitor import actor

    monkeypatch.setattr(actor, "_end", lambda name: None)
    monitor, file = actor.Monitor("described", cluster.id, "rlb-described:"), registry.session_file("described")

    def changes(fields):
        before = file.stat().st_ino
        monitor.apply(0, {"do": "engine", "name": "echo", "fields": fields})
        return file.stat().st_ino != before

    worker = {"actors": ["rlbench/described/echo/0"], "pids": {"rlbench/described/echo/0": os.getpid()}}
    assert changes(worker) and not changes({"state": {"version": 3}}) and not changes(worker)
    assert registry.read_json(file)["workers"] == {
        "rlbench/described/echo/0": [os.getpid(), processes.start_time(os.getpid())]
    }
    assert changes(None) and registry.read_json(file)["workers"] == {}
    assert monitor.close()


SCRIPT = """
import os, sys
import rlbench as rb
from rlbench.dispatch.link import Link, spawn_host
import ray
rb.init()
if "notebook" in sys.argv:
    from rlbench.dispatch import link as links
    links.driver_mode = lambda: "notebook"
link = Link.create("forsaken", lease_s=float(sys.argv[1]))
host = spawn_host(link, "echo", 0, "tests.targets:EchoTarget", (0,), {}, {"num_cpus": 0})
link.engine("echo", {"kind": "train", "actors": ["rlbench/forsaken/echo/0"]})
print(ray.get(host.pid.remote()), link.state()["pid"], flush=True)
if "notebook" in sys.argv:
    sys.stdin.read()  # it lives, and calls nothing
os._exit(1)
"""


def test_the_session_of_a_script_that_died_ends_after_its_lease(cluster, repository):
    died = subprocess.run(
        [sys.executable, "-c", SCRIPT, "1.0"], capture_output=True, text=True, timeout=120, cwd=repository
    )
    worker, monitor = map(int, died.stdout.split())
    until(lambda: processes.start_time(worker) is None and processes.start_time(monitor) is None)
    assert not registry.session_file("forsaken").exists()
    with pytest.raises(SessionError, match="no session 'forsaken'"):
        Link.attach("forsaken")


def test_a_notebook_that_is_left_alone_keeps_its_session_until_its_kernel_is_gone(cluster, repository):
    kernel = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "6.0", "notebook"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=repository,
    )
    assert kernel.stdin is not None and kernel.stdout is not None
    try:
        worker, monitor = map(int, kernel.stdout.readline().split())
        record = client.find("forsaken")
        os.kill(kernel.pid, signal.SIGSTOP)  # nor does it say that it lives
        until(lambda: client.ask(record, "/state")["driver"]["age_s"] > 7.0)
        held = client.ask(record, "/state")["lease"]
        assert (held["seconds"], held["left_s"]) == (6.0, None) and processes.start_time(worker) is not None
    finally:
        kernel.kill()
        kernel.wait()
    assert client.ask(record, "/state")["lease"]["left_s"] > 0, "counted from its death, not from its last call"
    until(lambda: processes.start_time(worker) is None and processes.start_time(monitor) is None)
    assert not registry.session_file("forsaken").exists()


def test_a_session_that_was_taken_up_again_lives_on(cluster, repository):
    died = subprocess.run(
        [sys.executable, "-c", SCRIPT, "600"], capture_output=True, text=True, timeout=120, cwd=repository
    )
    worker = int(died.stdout.split()[0])
    found = Link.attach("forsaken")
    assert found.state()["driver"]["pid"] == os.getpid() and "lease_s" not in found.state()["driver"]
    assert processes.start_time(worker) is not None
    found.close()


@pytest.mark.parametrize("name", ["/", "a/b", "../up", "-x", "x" * 65, "a:b"])
def test_a_session_name_that_cannot_be_a_file_name_is_refused(cluster, name):
    with pytest.raises(SessionError, match="use letters, digits"):
        Link.create(name)
