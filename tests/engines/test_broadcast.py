"""Weights by broadcast, from real ranks to real vLLM replicas over real gloo, end in equal log-probs.

How it ends when something fails: test_broadcast_trouble.py. On GPUs the same path runs over NCCL: test_sync_gpu.py.
"""

import pytest

from tests.engines.broadcasting import build_ranks, build_replicas, tokens
from tests.engines.syncing import gap, perturb
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
