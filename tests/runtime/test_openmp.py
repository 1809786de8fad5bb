"""The OpenMP runtime of workers: which it is, what it reads, and that numbers do not depend on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlbench.runtime import head, openmp

OWN = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "1", "KMP_AFFINITY": "none"}


def test_threads_wait_awake_for_a_millisecond_unless_said_otherwise(tmp_path, monkeypatch):
    for name in OWN:
        monkeypatch.delenv(name, raising=False)
    assert head.environment(tmp_path).items() >= OWN.items()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("KMP_BLOCKTIME", "20")
    assert head.environment(tmp_path).items() >= {"OMP_WAIT_POLICY": "active", "KMP_BLOCKTIME": "20"}.items()


def test_it_is_loaded_before_torch_or_not_at_all(tmp_path, monkeypatch):
    import torch  # noqa: F401

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert not openmp.load(), "an environment without it keeps torch's own"
    library = tmp_path / openmp.LIBRARY
    library.parent.mkdir()
    library.touch()
    with pytest.raises(RuntimeError, match="before torch"):
        openmp.load()


def numbers() -> bytes:
    """Compute what runs in parallel regions, by two threads: products, normalisation, softmax, their gradients."""
    import torch

    before = torch.get_num_threads()
    torch._C.set_num_threads(2)  # vLLM replaces the public function
    try:
        draws = torch.Generator().manual_seed(0)
        x = torch.randn(300, 512, generator=draws, requires_grad=True)
        w = torch.randn(512, 512, generator=draws, requires_grad=True)
        hidden = torch.nn.functional.layer_norm(torch.nn.functional.silu(x @ w), (512,))
        logprobs = torch.log_softmax(hidden @ w.T, dim=-1)
        heads = hidden.view(1, 300, 8, 64).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        (logprobs.exp().square().sum() + attended.mean()).backward()
        parts = [logprobs.detach(), attended.detach(), x.grad, w.grad]
        return b"".join(part.contiguous().numpy().tobytes() for part in parts)
    finally:
        torch._C.set_num_threads(before)


@pytest.mark.engine
@pytest.mark.skipif(not (Path(sys.prefix) / openmp.LIBRARY).is_file(), reason="this environment has torch's runtime")
def test_a_worker_computes_with_it_on_all_cores_what_torchs_own_computes_and_leaves_nothing_behind(cluster):
    import ray

    computed = numbers

    @ray.remote(num_cpus=0)
    class Process:
        def facts(self):
            with open("/proc/self/maps") as maps:
                loaded = "libiomp5" in maps.read()
            child = subprocess.Popen(["true"], preexec_fn=os.getpid)  # which forks, as a data loader's workers do
            child.wait()
            return computed(), loaded, [os.getpid(), os.getppid(), child.pid], len(os.sched_getaffinity(0))

    processes = [Process.remote() for _ in range(2)]  # of which one may be the cluster's first
    bits, loaded, pids, cores = ray.get([process.facts.remote() for process in processes])[1]
    assert loaded and bits == numbers() and cores == len(os.sched_getaffinity(0))
    assert not [note for note in openmp.NOTES.glob("__KMP_REGISTERED_LIB_*") if int(note.name.split("_")[-2]) in pids]
