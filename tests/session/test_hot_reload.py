"""Edited code on live workers: twenty losses in a row, a local module that is edited, a redefinition that outlives its
ranks."""

import importlib
import os
import signal
import sys

import pytest

import rlbench as rb
from rlbench.tiny import tasks
from rlbench.trainers.passes.loss_value import KEPT

pytestmark = pytest.mark.engine

EDITS = 20
CELL = """
def helper(x):
    return {n} * x

def edited(inputs):
    junk = b"{filler}"
    return helper(-inputs.advantages * inputs.logprobs), {{"edit": {n}.0}}
"""


@pytest.fixture(scope="module")
def batch(session):
    session.sync_weights()
    rollouts = session.rollout(tasks.prompts(4, seed=31), n=4, max_tokens=8)
    return rollouts.score([i % 2 for i in range(rollouts.samples)]).batch(advantage=rb.rl.group_normalized())


def held(session):
    """Of every rank: bytes of Python's objects since `traced` began, losses kept, and what came by value.

    Not the process's resident size: what an allocator keeps for itself moves by more than a leak would.
    """

    def count():
        import gc
        import tracemalloc
        import types

        import cloudpickle.cloudpickle as internals

        from rlbench.trainers.passes.loss_value import LossCache

        gc.collect()
        caches = [o for o in gc.get_objects() if isinstance(o, LossCache)]
        edited = [o for o in gc.get_objects() if isinstance(o, types.FunctionType) and o.__name__ == "edited"]
        kept = sum(len(cache._held) for cache in caches)
        return tracemalloc.get_traced_memory()[0], kept, len(edited), len(internals._DYNAMIC_CLASS_TRACKER_BY_ID)

    return session.train.run(count)


@pytest.fixture
def traced(session):
    """Python's own count of the bytes of its objects, on every rank."""

    def start():
        import tracemalloc

        tracemalloc.start(1)

    def stop():
        import tracemalloc

        tracemalloc.stop()

    session.train.run(start)
    yield
    session.train.run(stop)


def edit(n, filler=""):
    space = {"__name__": "__main__"}
    exec(compile(CELL.format(n=n, filler=filler), f"<cell {n}>", "exec"), space)
    return space["edited"]


@pytest.mark.curve
def test_a_loss_edited_twenty_times_shows_twenty_hashes_and_leaves_nothing_behind(session, batch, traced):
    big = "x" * (2 << 20)  # a leak of twenty of them would show
    for n in range(KEPT + 2):  # the ranks keep so many
        session.train_step(batch, edit(1000 + n, big))
    before, first = held(session), len(session.history)
    seen = [session.train_step(batch, edit(n, big)) for n in range(1, EDITS + 1)]
    records = session.history[first:]
    assert len({record["loss_hash"] for record in records}) == len(records) == EDITS
    assert [metrics.edit for metrics in seen] == list(range(1, EDITS + 1))
    again = session.train_step(batch, edit(EDITS, big))
    assert again.loss_hash == records[-1]["loss_hash"]
    for (traced_before, *_), (traced_after, kept, functions, classes) in zip(before, held(session), strict=True):
        assert kept <= KEPT and functions <= KEPT and classes < 50
        assert traced_after - traced_before < EDITS << 20  # half of what all of them together take


def test_a_local_module_that_is_edited_and_reloaded_is_new_on_the_ranks(session, batch, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = (
        "import rlb_user_scale\n"
        "def shaped(x):\n    return rlb_user_scale.scale(-x.advantages * x.logprobs), {{'k': {k}}}\n"
    )
    (tmp_path / "rlb_user_scale.py").write_text("def scale(x):\n    return 2 * x\n")
    (tmp_path / "rlb_user_loss.py").write_text(text.format(k=1.0))
    module = importlib.import_module("rlb_user_loss")
    try:
        one = session.forward_backward(batch, module.shaped)
        session.zero_grad()
        (tmp_path / "rlb_user_scale.py").write_text("def scale(x):\n    return 6 * x\n")
        (tmp_path / "rlb_user_loss.py").write_text(text.format(k=3.0))
        importlib.reload(sys.modules["rlb_user_scale"])
        module = importlib.reload(module)
        two = session.forward_backward(batch, module.shaped)
        session.zero_grad()
    finally:
        sys.modules.pop("rlb_user_loss"), sys.modules.pop("rlb_user_scale", None)
    assert two.loss == pytest.approx(3 * one.loss, rel=1e-4) and (one.k, two.k) == (1.0, 3.0)
    assert one.loss_hash != two.loss_hash
    assert "def shaped" in two.loss_source and "return 6 * x" in two.loss_source


def rewarded(rollout):
    return float(len(rollout.token_ids) % 2)


def test_the_record_of_every_step_holds_the_text_of_its_loss_reward_and_advantage(session):
    rollouts = session.rollout(tasks.prompts(4, seed=32), n=4, max_tokens=8)
    batch = rollouts.score(rewarded).batch(advantage=rb.rl.group_normalized(eps=1e-3))

    def mine(x):
        return -x.advantages * x.logprobs, {}

    session.train_step(batch, mine)
    session.train_step(batch, rb.rl.grpo(clip_high=0.25))
    own, standard = session.history[-2:]
    assert "return -x.advantages * x.logprobs, {}" in own["loss_source"]
    assert "clip_high=0.25" in standard["loss_source"]
    assert own["reward_name"] == "rewarded" and "token_ids) % 2" in own["reward_source"]
    assert "0.001" in own["advantage_source"] and own["advantage_hash"] != own["reward_hash"]


def test_what_was_redefined_is_there_again_after_its_ranks_died(cluster, tiny_path):
    with rb.Session("tiny", name="reload-heal", train={"shards": 2}) as session:

        @session.method
        def probe(self):
            return 41 + self.rank

        @session.method
        def probe(self):  # noqa: F811
            return 42 + self.rank

        os.kill(session.train.run(os.getpid)[0], signal.SIGKILL)
        session.heal()
        assert session.train.probe() == [42, 43]
        assert rb.attach("reload-heal", take_over=True).train.probe() == [42, 43]
