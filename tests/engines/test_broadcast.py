"""Weights by broadcast, from real ranks to real vLLM replicas over real gloo, end in equal log-probs; by any transport,
those that are frozen and unchanged stay where they are.

How it ends when something fails: test_broadcast_trouble.py. On GPUs the same path runs over NCCL: test_sync_gpu.py.
"""

import numpy as np
import pytest

from rlbench.weights.probe import probe_tokens
from tests.engines.broadcasting import build_ranks, build_replicas, tokens
from tests.engines.syncing import edit, freeze, gap, perturb, train_on
from tests.workers.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=[(True, 2), (False, 1)], ids=["tied-two-replicas", "untied-one-replica"])
def placed(request, cluster, tmp_path_factory):
    tied, replicas = request.param
    folder = make_checkpoint(tmp_path_factory.mktemp("broadcast"), tied=tied)
    infer = build_replicas(folder, replicas, f"broadcast-{replicas}")
    yield folder, infer
    infer.close()


@pytest.fixture(scope="module", params=[1, 2], ids=["one-rank", "two-ranks"])
def train(request, placed):
    engine = build_ranks(placed[0], request.param, f"broadcast-train{request.param}")
    yield engine
    engine.close()


@pytest.fixture
def infer(placed):
    return placed[1]


def test_after_a_broadcast_every_replica_computes_the_trainers_log_probs(train, infer):
    for _ in range(2):
        train.run(perturb)
        assert gap(train, infer) > 1e-2  # else the next lines prove nothing
        done = train.p2p_weight_sync(infer, transport="broadcast")
        assert done["transport"] == "broadcast" and done["gap"] <= 1e-4  # of all replicas
        assert gap(train, infer) <= 1e-4
        assert set(infer.weight_versions()) == {done["version"]}
    assert infer.generate(["sort 12", "sort 34"], n=2, max_tokens=3).weight_version == done["version"]


def test_the_group_is_made_once_and_other_transports_leave_it_alone(train, infer):
    train.p2p_weight_sync(infer, transport="broadcast")
    first = tokens(infer)
    assert len(set(first)) == 1 and first[0]
    assert train.p2p_weight_sync(infer)["transport"] == "shm"  # what is chosen on one host without a GPU
    train.p2p_weight_sync(infer, transport="broadcast")
    assert tokens(infer) == first


FROZEN = ("model.layers.0.", "model.embed_tokens")


@pytest.fixture
def half_frozen(train):
    train.run(freeze, *FROZEN)
    yield train
    train.run(freeze, "no parameter of this name")


def logprobs(infer):
    return np.concatenate(infer.logprobs(probe_tokens(infer.info["vocab_size"])))


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_what_is_frozen_and_unchanged_is_not_sent_again(half_frozen, infer, transport):
    train, layout = half_frozen, half_frozen.call_all("weight_layout").result()[0]
    of_layer = [e.name for e in layout.entries if e.name.startswith("model.layers.0.")]
    train.p2p_weight_sync(infer, transport=transport)
    for _ in range(2):
        train.run(train_on)
        assert gap(train, infer) > 1e-2
        done = train.p2p_weight_sync(infer, transport=transport)
        assert done.gap <= 1e-4 and gap(train, infer) <= 1e-4
        assert done.unchanged == len(of_layer) + 1 and done.tensors + done.unchanged == len(list(layout.entries))
        assert done.bytes + done.unchanged_bytes == layout.nbytes and done.unchanged_bytes > layout.nbytes / 4
        assert f"({done.unchanged} unchanged) by {transport}" in repr(done)
    after_a_part = logprobs(infer)
    infer.reload()
    assert train.p2p_weight_sync(infer, transport=transport).unchanged == 0, "replicas that read their checkpoint"
    assert np.abs(logprobs(infer) - after_a_part).max() <= 1e-6


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_a_frozen_weight_that_was_changed_by_hand_on_one_rank_is_sent(half_frozen, infer, transport):
    train = half_frozen
    train.p2p_weight_sync(infer, transport=transport)
    train.run(edit, "model.layers.0.mlp.up_proj.weight", train.world_size - 1)
    assert gap(train, infer) > 1e-3
    done = train.p2p_weight_sync(infer, transport=transport)
    assert gap(train, infer) <= 1e-4 and done.unchanged == 1, "its layer goes as a whole"
    train.run(edit, "model.embed_tokens.weight", 0)
    assert gap(train, infer) > 1e-3
    assert train.p2p_weight_sync(infer, transport=transport).unchanged > 1 and gap(train, infer) <= 1e-4


def test_a_part_after_another_transport_leaves_the_whole_in_shared_memory(half_frozen, infer):
    """What a trainer that is built again goes on from."""
    train = half_frozen
    train.p2p_weight_sync(infer, transport="shm")
    train.run(edit, "model.layers.0.mlp.up_proj.weight", 0)
    train.p2p_weight_sync(infer, transport="broadcast")
    train.run(train_on)
    done = train.p2p_weight_sync(infer, transport="shm")
    assert done.unchanged == 1, "what the replicas hold already was written nevertheless"
    before, record = train.call_all("state_checksum").result()[0], infer.link.state()["engines"][train.name]
    assert record["staged_version"] == done.version
    train.run(perturb)
    train.call_all("load_staged", record["staged"]).result()
    assert train.call_all("state_checksum").result()[0] == before and gap(train, infer) <= 1e-4
