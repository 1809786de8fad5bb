"""What only GPUs can show of a weight sync: the transport chosen, CUDA IPC on several GPUs, NCCL between them."""

import pytest
import torch

import rlbench as rb
from rlbench.trainers.models.policy_spec import PolicySpec
from tests.engines.broadcasting import small_buckets, tokens
from tests.engines.syncing import gap, perturb

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.engine]
two_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs two NVIDIA GPUs, this machine has {GPUS}")
ALLOWED = 1e-3  # float32 on both sides, by different kernels


def build(tiny_path, ranks, replicas, apart=False, tensor_parallel=1):
    name = f"gpu{ranks}{replicas}{tensor_parallel}{apart}"
    infer = rb.InferenceEngine(
        str(tiny_path), name=f"{name}-inference", dtype="float32", kv_cache_bytes=1 << 30, max_num_seqs=16
    )
    infer.build(tensor_parallel_size=tensor_parallel, data_parallel_size=replicas)
    train = rb.TrainEngine(PolicySpec(str(tiny_path)), name=f"{name}-train", bf16=False)
    beside = {"not_colocate_with": infer} if apart else {"colocate_with": infer}
    train.build(tensor_parallel_size=ranks, data_parallel_size=1, **beside)
    train.run(small_buckets)
    return train, infer


def assert_synced(train, infer, chosen, **options):
    for _ in range(2):
        train.run(perturb)
        assert gap(train, infer) > 1e-2
        assert train.p2p_weight_sync(infer, **options)["transport"] == chosen
        assert gap(train, infer) <= ALLOWED
    train.close()
    infer.close()


def test_on_one_shared_gpu_ipc_is_chosen_and_frees_what_it_staged(cluster, tiny_path):
    train, infer = build(tiny_path, 1, 1)
    before = train.run(lambda: __import__("torch").cuda.memory_allocated())[0]
    train.p2p_weight_sync(infer)
    assert train.run(lambda: __import__("torch").cuda.memory_allocated())[0] - before < 1 << 20
    with pytest.raises(rb.errors.WeightSyncError, match="NCCL takes a GPU once"):
        train.p2p_weight_sync(infer, transport="broadcast")
    assert_synced(train, infer, "ipc")


@two_gpus
@pytest.mark.parametrize(("replicas", "tensor_parallel"), [(2, 1), (1, 2)], ids=["two-replicas", "tensor-parallel"])
def test_on_two_shared_gpus_each_gpu_has_its_own_exporter(cluster, tiny_path, replicas, tensor_parallel):
    assert_synced(*build(tiny_path, 2, replicas, tensor_parallel=tensor_parallel), "ipc")


@two_gpus
def test_gpus_apart_take_an_nccl_broadcast_over_one_group(cluster, tiny_path):
    train, infer = build(tiny_path, 1, 1, apart=True)
    train.p2p_weight_sync(infer)
    first = tokens(infer)
    train.p2p_weight_sync(infer)
    assert tokens(infer) == first and first[0]
    assert_synced(train, infer, "broadcast")


@two_gpus
def test_the_rank_without_a_replica_on_its_gpu_sends(cluster, tiny_path):
    assert_synced(*build(tiny_path, 2, 1), "broadcast", transport="broadcast")
