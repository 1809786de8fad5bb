"""A kernel that dies leaves its engines: a new one finds them with their weights and can stop what still runs."""

import os
import signal
import subprocess
import sys

import pytest

import rlbench as rb
from rlbench.errors import SessionError
from rlbench.tiny import tasks

pytestmark = pytest.mark.engine

KERNEL = """
import rlbench as rb
from rlbench.tiny import tasks
session = rb.Session("tiny", name="survivor", train={"lr": 1e-4})
rollouts = session.rollout(tasks.prompts(8), n=4, max_tokens=12)
batch = rollouts.score(tasks.reward).batch(advantage=rb.rl.group_normalized())
session.train_step(batch)
session.sync_weights()
print("SUM", session.train.call_all("state_checksum").result()[0], flush=True)
session.rollout(tasks.prompts(64), n=64, max_tokens=1800, ignore_eos=True, progress=False)
"""


def test_killing_the_kernel_in_the_middle_of_a_rollout_loses_nothing(cluster, tiny_path):
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL], stdout=subprocess.PIPE, text=True)
    for line in kernel.stdout:
        if line.startswith("SUM"):
            break
    else:
        pytest.fail("the kernel ended before it trained")
    checksum = line.split()[1]
    os.kill(kernel.pid, signal.SIGKILL)
    kernel.wait()

    session = rb.attach("survivor")
    assert session.last.number == 1 and session.last.samples == 32, "the rollouts that were finished"
    assert session.stop() in ([], ["rollout 2"])
    assert (session.step, session.version) == (1, 1)
    assert session.train.call_all("state_checksum").result() == [checksum]
    assert len(session.history) == 1 and session.history[0]["loss_name"] == "grpo"
    again = session.last.score(tasks.reward).batch(advantage=rb.rl.group_normalized())
    seen = session.forward_backward(again)
    session.zero_grad()
    assert seen.kl > 0, "a batch the first kernel trained on has its ratios against the policy that saw it first"
    rollouts = session.rollout(tasks.prompts(4), n=2, max_tokens=8)
    assert rollouts.samples == 8 and rollouts.weight_version == 1
    batch = rollouts.score(tasks.reward).batch(advantage=rb.rl.group_normalized())
    assert session.train_step(batch).step == 2
    session.close()
    with pytest.raises(SessionError, match="no session 'survivor'"):
        rb.attach("survivor")


def test_attaching_to_nothing_says_what_there_is(cluster):
    with pytest.raises(SessionError, match="no session 'nobody'"):
        rb.attach("nobody")
