"""Control verbs from outside the kernel: when that is dead, alive and idle, or in the middle of a call."""

import os
import signal
import subprocess
import sys

import pytest

import rlbench as rb
from rlbench.errors import SessionError, StateError, Stopped
from rlbench.monitor import client
from rlbench.tiny import tasks
from tests.clock import until
from tests.session.looking import state

pytestmark = pytest.mark.engine


def command(session, verb, **args):
    """Run a verb to its end through the endpoint; returns its result."""
    idle(session)
    return client.command(client.find(session.name), verb, args)["result"]


def engine(session, name):
    return next(e for e in state(session)["engines"] if e["name"] == name)


def idle(session):
    """Wait until what this process did is over at the monitor too: workers and kernel tell it without waiting."""
    until(lambda: not state(session)["running"] and not state(session)["verbs"])


def trained(session):
    rollouts = session.rollout(tasks.prompts(6), n=4, max_tokens=8, progress=False)
    return session.train_step(rollouts.score(tasks.reward).batch(advantage=rb.rl.group_normalized()))


# -- the kernel is dead

KERNEL = """
import time
import rlbench as rb
from rlbench.tiny import tasks
session = rb.Session("tiny", name="orphan", train={"lr": 1e-4}, lease_s=3600)
rollouts = session.rollout(tasks.prompts(6), n=4, max_tokens=8, progress=False)
session.train_step(rollouts.score(tasks.reward).batch(advantage=rb.rl.group_normalized()))
print("READY", flush=True)
time.sleep(600)
"""


def test_a_dead_kernels_session_is_offloaded_synced_and_kept_and_the_next_kernel_finds_it(cluster, tiny_path):
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL], stdout=subprocess.PIPE, text=True)
    assert any(line.startswith("READY") for line in kernel.stdout), "the kernel ended before it trained"
    record = client.find("orphan")
    os.kill(kernel.pid, signal.SIGKILL)
    kernel.wait()
    until(lambda: not client.ask(record, "/state")["driver"]["alive"])
    until(lambda: not client.ask(record, "/state")["running"])  # a worker tells of a call's end without waiting

    def run(verb, **args):
        return client.command(client.find("orphan"), verb, args)["result"]

    synced = run("sync")
    assert synced["version"] == 1 and synced["gap"] <= 1e-4 and synced["transport"] == "shm"
    kept = run("snapshot", label="without a kernel")
    assert kept["label"] == "without a kernel" and kept["step"] == 1 and kept["bytes"] > 0 and "folder" not in kept
    assert run("offload", engine="train")["weights"] == "cpu"
    said = client.ask(client.find("orphan"), "/state")
    assert said["driver"]["pid"] == kernel.pid and not said["driver"]["alive"], "the kernel's record stays"
    assert next(e for e in said["engines"] if e["name"] == "actor")["state"]["weights"] == "cpu"
    with pytest.raises(SessionError, match="nearest: train"):
        run("onload", engine="trian")

    session = rb.attach("orphan")
    with pytest.raises(StateError, match=r"onload|cuda"):
        trained(session)
    idle(session)
    assert run("onload", engine="train")["weights"] == "cuda"
    assert session.inference.weight_versions() == [1] and session.step == 1
    assert trained(session).step == 2
    assert session.restore("without a kernel").step == session.step == 1
    session.close()


# -- the kernel lives


def test_the_driver_goes_on_by_itself_after_a_control_verb(session):
    before, epoch = trained(session).step, session.core.link.epoch
    command(session, "sync")
    command(session, "offload", engine="inference", parts=["kv_cache"])
    assert engine(session, "inference")["state"]["kv_cache"] == "meta"
    with pytest.raises(StateError, match="kv_cache"):
        session.rollout(["sort 1"])
    command(session, "onload", engine="inference", parts=["kv_cache"])
    assert trained(session).step == before + 1
    assert session.core.link.epoch > epoch and state(session)["driver"]["pid"] == os.getpid()
    session.sync_weights()


def test_what_drives_the_session_is_refused_while_a_rollout_runs_and_stop_ends_it(session):
    pending = session.rollout(tasks.prompts(64), n=16, max_tokens=1500, ignore_eos=True, progress=False, block=False)
    until(lambda: any(call["progress"] for call in state(session)["running"]))
    record = client.find(session.name)
    train = {"engine": "train"}
    for verb, args in (("sync", {}), ("snapshot", {}), ("offload", train), ("onload", train)):
        with pytest.raises(client.Refused, match=r"rollout .* runs; stop it first"):
            client.command(record, verb, args)
    assert client.command(record, "stop")["result"]["stopped"] == [pending.what]
    with pytest.raises(Stopped) as stopped:
        pending.result(timeout=120)
    assert stopped.value.partial.aborted.any()
    assert command(session, "offload", engine="reference")["weights"] == "cpu"
    assert command(session, "onload", engine="reference")["weights"] == "cuda"


def test_what_lists_sessions_shows_no_token(session):
    (row,) = [row for row in rb.sessions() if row["name"] == session.name]
    assert row["pid"] == client.find(session.name)["pid"] and not {"token", "url"} & set(row)


def test_another_notebook_is_still_refused_after_a_control_verb(session):
    command(session, "snapshot", label="by hand")
    code = (
        "import rlbench as rb\n"
        "try:\n"
        "    rb.attach('shared')\n"
        "except rb.errors.SessionError as error:\n"
        "    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert f"driven by pid {os.getpid()} (script)" in said.stdout, said.stderr
    assert session.snapshots["by hand"].step == session.step
    assert session.drop("by hand") == ["by hand"]


def test_a_session_that_another_notebook_took_over_is_not_given_back_by_a_control_verb(session):
    taken = rb.attach(session.name, take_over=True)
    try:
        command(taken, "offload", engine="train")
        command(taken, "onload", engine="train")
        with pytest.raises(SessionError, match="another notebook"):
            session.rollout(["sort 1"], max_tokens=2)
        with pytest.raises(SessionError, match="another notebook"):
            session.lr = 0.5
        assert taken.rollout(["sort 1"], max_tokens=2).samples == 1
    finally:
        taken.core.link.release()
        session.core.link.epoch = rb.attach(session.name, take_over=True).core.link.epoch  # the shared one drives again
