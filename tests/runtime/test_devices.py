"""What a machine offers, and what NVML says of it."""

import pytest

from rlbench.runtime import devices


def test_a_host_may_hide_its_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    devices.gpu_count.cache_clear()
    assert devices.gpu_count() == 0 and devices.gpu_memory() == []
    devices.gpu_count.cache_clear()


def test_visible_devices_are_counted_as_cuda_counts_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    devices.gpu_count.cache_clear()
    assert devices.gpu_count() == 2
    devices.gpu_count.cache_clear()


@pytest.mark.gpu
def test_nvml_sees_what_torch_allocates():
    import torch

    torch.cuda.empty_cache()  # what other tests left there would be taken again
    before = devices.gpu_memory()[0]
    held = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    after = devices.gpu_memory()[0]
    assert after["used"] - before["used"] >= held.numel() * 0.9 and after["total"] == before["total"] > after["used"]
