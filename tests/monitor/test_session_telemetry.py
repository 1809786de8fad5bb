"""What a live session's monitor tells of memory, of what ran, and of the lengths of its rollouts."""

import itertools
import time

import numpy as np
import pytest

from rlbench.errors import Stopped
from rlbench.monitor import client
from tests.clock import LIMIT_S, until

pytestmark = pytest.mark.engine
MIB = 1 << 20


class Watched:
    """A session as somebody sees it who looks at its monitor."""

    def __init__(self, session):
        self.name, self.record = session.name, client.find(session.name)

    def samples(self, since=0.0):
        return client.ask(self.record, f"/samples?since={since}")

    def state(self):
        return client.ask(self.record, "/state")

    def owners(self, engine, worker=0):
        """Bytes by owner in a sample that was taken, and asked for, after this call; with its resident bytes."""
        name, begin = f"rlbench/{self.name}/{engine}/{worker}", time.time() + 0.6
        sample = until(lambda: next((s for s in self.samples(begin)["samples"] if name in s["owners"]), None))
        return sample["owners"][name], sample["resident"][name]

    def engine(self, name):
        return next(engine for engine in self.state()["engines"] if engine["name"] == name)


@pytest.fixture
def watched(session):
    return Watched(session)


@pytest.fixture
def still(session):
    """Steps of this test leave the shared session's weights alone, and its learning rate as it was."""
    before = session.lr
    session.lr = 0.0
    yield
    session.lr = before


PROMPTS = ["sort 3 1 2 :", "sort 52143 :", "sort 9 8 :"]


def test_the_owners_of_every_process_add_up_to_what_it_holds(session, watched):
    for engine, kinds in (
        ("actor", {"weights", "gradients", "optimizer", "activations", "other"}),
        ("inference", {"weights", "kv_cache", "other"}),
    ):
        owners, resident = watched.owners(engine)
        assert set(owners) == kinds and sum(owners.values()) == resident
        assert owners["weights"] > 0 and owners["other"] > 0


def test_the_kv_cache_goes_and_comes_and_its_owner_with_it(session, watched):
    session.rollout(PROMPTS, n=4, max_tokens=16, progress=False)
    held = watched.owners("inference")[0]["kv_cache"]
    shown = watched.engine("inference")
    assert shown["bytes"]["kv_cache"] == shown["frees"]["kv_cache"] >= held > 0
    assert shown["frees"]["weights"] == 0 < shown["bytes"]["weights"], "there is nowhere else to keep them"
    session.offload("inference", "kv_cache")
    try:
        owners, resident = watched.owners("inference")
        assert owners["kv_cache"] == 0 and sum(owners.values()) == resident
        assert watched.engine("inference")["frees"]["kv_cache"] == 0
    finally:
        session.onload("inference", "kv_cache")
    session.rollout(PROMPTS, n=4, max_tokens=16, progress=False)
    assert watched.owners("inference")[0]["kv_cache"] > 0


def test_weights_that_were_released_are_nobodys(session, watched):
    before = watched.owners("reference")[0]["weights"]
    session.reference.meta("weights")
    try:
        assert watched.owners("reference")[0]["weights"] == 0
        assert watched.engine("reference")["bytes"]["weights"] == 0
    finally:
        session.reference.cuda("weights")
    assert watched.owners("reference")[0]["weights"] == before > 0


def batch_of(rollouts):
    return rollouts.score(list(range(rollouts.samples))).batch(advantage=lambda rewards, group: rewards - 1.0)


def test_what_ran_is_marked_in_order_and_its_time_is_the_steps(session, watched, still):
    begin, wall = watched.samples()["time"], time.perf_counter()
    first = session.train_step(batch_of(session.rollout(PROMPTS, max_tokens=8, progress=False)))
    batch = batch_of(session.rollout(PROMPTS, max_tokens=8, progress=False))
    session.sync_weights()
    session.offload("train", "optimizer")
    session.onload("train", "optimizer")
    second = session.train_step(batch)
    splits = until(lambda: (s := watched.state()["splits"])[-1:] and s[-1]["step"] == second.step and s)
    marks = watched.samples(begin)["marks"]
    assert [m["what"] for m in marks] == ["rollout", "train", "rollout", "sync", "offload", "onload", "train"]
    assert marks[1]["label"] == "train_step" and marks[4]["label"] == "actor.cpu()" and marks[4]["engine"] == "actor"
    for one, then in itertools.pairwise(marks):
        # no more: a call's end comes from its worker, the next begin from here, and one may overtake the other
        assert one["seconds"] is not None and one["time"] <= then["time"]
    split = splits[-1]
    parts = {name: split[name] for name in ("rollout", "train", "sync", "other", "idle")}
    assert split["seconds"] == pytest.approx(sum(parts.values())) and split["score"] is None
    assert 0 < split["seconds"] < time.perf_counter() - wall and splits[-2]["step"] == first.step
    for name, own in (("rollout", marks[2:3]), ("sync", marks[3:4]), ("other", marks[4:6]), ("train", marks[6:])):
        assert parts[name] == pytest.approx(sum(m["seconds"] for m in own), abs=0.01), name
    assert split["tokens_per_s"] == pytest.approx(second.tokens_per_s)


def test_the_lengths_of_a_rollout_are_numpys(session, watched):
    rollouts = session.rollout(PROMPTS, n=6, max_tokens=40, progress=False)
    lengths = rollouts.lengths
    told = until(lambda: (s := watched.state()["lengths"]) and s[-1]["rollout"] == rollouts.number and s[-1])
    assert told["samples"] == 18 and told["max"] == lengths.max() and told["aborted"] == 0
    assert [told["p50"], told["p90"], told["p99"]] == pytest.approx(np.percentile(lengths, [50, 90, 99]).tolist())
    assert told["counts"] == np.histogram(lengths, told["edges"])[0].tolist() and sum(told["counts"]) == 18
    assert told["truncated"] == pytest.approx(rollouts.truncated.mean())
    assert told["version"] == rollouts.weight_version and told["step"] == session.step


def test_a_rollout_that_was_stopped_counts_with_what_it_has(session, watched):
    pending = session.rollout(PROMPTS, n=8, block=False, progress=False, max_tokens=1000, ignore_eos=True)
    until(lambda: any(p.get("tokens", 0) > 50 for r in watched.state()["running"] for p in r["progress"]))
    pending.stop()
    with pytest.raises(Stopped) as stopped:
        pending.result(timeout=LIMIT_S)
    partial = stopped.value.partial
    told = until(lambda: (s := watched.state()["lengths"]) and s[-1]["rollout"] == partial.number and s[-1])
    assert told["aborted"] == partial.aborted.sum() > 0 and told["samples"] == partial.samples
    assert told["max"] == partial.lengths.max()


def test_an_evaluation_is_not_among_the_rollouts(session, watched):
    before = [e["rollout"] for e in watched.state()["lengths"]]
    session.evaluate(PROMPTS, lambda rollout: 0.0, max_tokens=4, progress=False)
    session.rollout(PROMPTS, max_tokens=4, progress=False)
    after = until(lambda: (s := [e["rollout"] for e in watched.state()["lengths"]]) != before and s)
    assert after[-1] == session.last.number and len(after) in (len(before) + 1, 32)


def test_while_it_generates_lengths_and_first_texts_are_told(session, watched):
    pending = session.rollout(PROMPTS * 40, n=8, block=False, progress=False, max_tokens=64)
    told = until(lambda: next((p for r in watched.state()["running"] for p in r["progress"] if p.get("first")), None))
    result = pending.result(timeout=LIMIT_S)
    assert len(told["first"]) <= 2 and all(any(t.startswith(f) for t in result.texts) for f in told["first"])
    assert 0 < sum(told["lengths"]["counts"]) <= result.samples


def test_a_step_says_how_it_was_computed(session, still):
    metrics = session.train_step(batch_of(session.rollout(PROMPTS, max_tokens=8, progress=False)))
    assert metrics.micro_batches >= 1 and metrics.padding == 0.0
    assert metrics.peak_bytes is None or metrics.peak_bytes > 50 * MIB
    padded = session.forward_backward(batch_of(session.last), packing=False)
    assert 0 < padded.padding < 1
    session.zero_grad()
    assert session.last.stats.get("peak_bytes", MIB) >= MIB
