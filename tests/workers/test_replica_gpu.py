"""What only a GPU can show of a vLLM replica: device memory freed by sleep, and a sync by CUDA IPC."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.vllm import VllmReplica
from tests.workers.ending import end_here

from .tiny_checkpoint import hf_logprobs, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and the CUDA build of vLLM"),
]

ALLOWED = 1e-2  # float32 of vLLM on a GPU against transformers on the host: 3.2e-3 seen on an H200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpu"), tied=True)


@pytest.fixture(scope="module")
def replica(folder: Path) -> Iterator[VllmReplica]:
    replica = VllmReplica(ReplicaConfig(str(folder), dtype="float32", kv_cache_bytes=2 << 30))
    assert replica.build()["device"] == "cuda"
    yield replica
    end_here(replica)


def trainer(folder: str, pipe: Any) -> None:
    """Another process on the same GPU: stages perturbed weights, keeps them until told to end."""
    from transformers import AutoModelForCausalLM

    from rlbench.weights.names import to_checkpoint_names, unique_parameters
    from rlbench.weights.staging import IpcStage

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    stage = IpcStage(bucket_bytes=100_000)
    pipe.send(stage.write(to_checkpoint_names(model, unique_parameters(model)).items()))
    pipe.recv()
    stage.close()


def test_sleep_frees_device_memory(replica: VllmReplica) -> None:
    free_before = torch.cuda.mem_get_info()[0]
    replica.to_state("meta", None)
    assert torch.cuda.mem_get_info()[0] - free_before > 1 << 30
    replica.to_state("cuda", None)
    assert replica.status()["weights"] == "cuda"


def test_a_sync_by_cuda_ipc_arrives(replica: VllmReplica, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=trainer, args=(str(folder), theirs))
    process.start()
    manifest = ours.recv()
    assert manifest.transport == "ipc"
    ids = list(range(60))
    before = replica.prompt_logprobs([ids])[0]
    replica.apply_weights(manifest)
    replica.commit_version(1)
    ours.send("done")
    process.join()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    expected = hf_logprobs(model, ids)
    assert np.abs(before - expected).max() > 10 * ALLOWED
    np.testing.assert_allclose(replica.prompt_logprobs([ids])[0], expected, atol=ALLOWED)
