"""Weights as differences, from two ranks to two replicas that were built so: always those of a whole sync, and whole
wherever a side is not known to hold the ones before.

What a worker's layers are given, bit by bit: tests/weights/test_replica_broadcast.py.
"""

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import WeightSyncError
from rlbench.options import OptionError
from rlbench.weights.probe import probe_tokens
from tests.engines.broadcasting import build_ranks, build_replicas, sabotage, states
from tests.engines.syncing import change_some, freeze, gap, perturb
from tests.workers.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.engine
HEAD = 16  # bytes that say of each tensor how it comes


@pytest.fixture(scope="module")
def folder(cluster, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("delta"), tied=True)


@pytest.fixture(scope="module")
def infer(folder):
    engine = build_replicas(folder, 2, "delta", delta=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def train(folder, infer):
    engine = build_ranks(folder, 2, "delta-train")
    yield engine
    engine.close()


def logprobs(infer):
    return np.concatenate(infer.logprobs(probe_tokens(infer.info["vocab_size"])))


def is_whole(done):
    return done.unchanged == 0 and done.spared_bytes < 0  # what says how each tensor comes, on top


def assert_as_a_whole_sync(train, infer):
    """What the replicas compute is, to the bit, what they do after all weights were sent."""
    by_differences = logprobs(infer)
    infer.reload()
    assert is_whole(train.p2p_weight_sync(infer)), "replicas that read their checkpoint"
    np.testing.assert_array_equal(logprobs(infer), by_differences)


def test_step_after_step_only_what_changed_travels_and_the_weights_are_those_of_a_whole_sync(train, infer):
    whole = train.p2p_weight_sync(infer)
    assert whole.transport == "broadcast" and is_whole(whole)
    before = logprobs(infer)
    for step, share in enumerate((0.02, 0.2, 0.02)):
        train.run(change_some, share, step)
        done = train.p2p_weight_sync(infer)
        assert done.gap <= 1e-4 and gap(train, infer) <= 1e-4
        assert done.whole_bytes == whole.whole_bytes and done.bytes < (0.1 if share < 0.1 else 0.3) * done.whole_bytes
        assert "as differences" in repr(done)
        assert np.abs(logprobs(infer) - before).max() > 1e-3, "else the gap proves nothing"
    assert train.p2p_weight_sync(infer).bytes == HEAD * done.tensors, "nothing changed"
    assert_as_a_whole_sync(train, infer)


def test_what_is_frozen_is_left_out_and_what_trains_goes_as_differences(train, infer):
    train.run(freeze, "model.layers.0.", "model.embed_tokens")
    whole = train.p2p_weight_sync(infer)
    for seed in (7, 8):
        train.run(change_some, 0.02, seed)
        done = train.p2p_weight_sync(infer)
        assert done.unchanged > 5 and done.spared_bytes > 0 and done.whole_bytes == whole.whole_bytes
        assert done.gap <= 1e-4
    train.run(freeze, "no parameter of this name")
    train.run(change_some, 0.02, 9)  # of those that were left out both sides have copies too
    done = train.p2p_weight_sync(infer)
    assert done.unchanged == 0 and done.bytes < 0.1 * done.whole_bytes
    assert_as_a_whole_sync(train, infer)


def test_after_a_sync_that_failed_all_is_sent(train, infer):
    train.p2p_weight_sync(infer)
    train.run(change_some, 0.02, 11)
    train.run(sabotage, fail=train.run(sabotage)[0] + 4, on_rank=1)
    with pytest.raises(WeightSyncError, match="the hook has had enough"):
        train.p2p_weight_sync(infer)
    assert set(states(infer)) == {"torn"}
    train.run(sabotage)
    done = train.p2p_weight_sync(infer)
    assert is_whole(done) and done.gap <= 1e-4 and gap(train, infer) <= 1e-4
    train.run(change_some, 0.02, 12)
    assert train.p2p_weight_sync(infer).spared_bytes > 0
    assert_as_a_whole_sync(train, infer)


def test_what_a_hook_makes_of_the_weights_goes_as_differences_too(train, infer):
    """Of which no rank says that it is unchanged."""
    train.run(sabotage, fail=10**6)  # a hook, which never fails
    train.run(perturb)
    train.p2p_weight_sync(infer)
    train.run(change_some, 0.02, 13)
    assert train.p2p_weight_sync(infer).spared_bytes > 0
    train.run(sabotage)
    assert_as_a_whole_sync(train, infer)


def test_weights_of_another_trainer_are_sent_whole_and_so_are_this_ones_after_them(train, infer, folder):
    train.p2p_weight_sync(infer)
    other = build_ranks(folder, 1, "delta-other")
    assert is_whole(other.p2p_weight_sync(infer))
    assert is_whole(train.p2p_weight_sync(infer)) and gap(train, infer) <= 1e-4
    other.close()


@pytest.mark.parametrize("transport", ["shm", "ipc"])
def test_a_transport_that_has_nothing_to_gain_is_refused(train, infer, transport):
    before = infer.weight_versions()
    with pytest.raises(WeightSyncError, match=rf"transport='{transport}' has nothing to gain from delta=True.*Leave"):
        train.p2p_weight_sync(infer, transport=transport)
    assert infer.weight_versions() == before


def test_adapters_and_another_executor_are_refused_where_the_options_are_given():
    with pytest.raises(OptionError, match="nothing to gain with adapters=2"):
        rb.Inference(delta=True, adapters=2)
    with pytest.raises(OptionError, match="delta=True cannot be honoured by executor='sglang'"):
        rb.Inference(delta=True, executor="sglang")
