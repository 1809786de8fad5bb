"""What this machine offers: GPUs where there are any, else slots that engines take turns on."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlbench.errors import ClusterError

PROC = Path("/proc/driver/nvidia/gpus")


@lru_cache(maxsize=1)
def gpu_count() -> int:
    """NVIDIA GPUs the driver shows and CUDA_VISIBLE_DEVICES allows; 0 where there is no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() not in ("", "-1")])
    if PROC.is_dir():  # the driver's own list: there in containers without its tools
        return len(list(PROC.iterdir()))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterError(
            "nvidia-smi did not answer within 30 s: check the driver, or set CUDA_VISIBLE_DEVICES"
        ) from None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def gpu_memory() -> list[dict[str, Any]]:
    """`name`, `used` and `total` bytes of each GPU as NVML sees it, all processes together; empty without a GPU."""
    if not PROC.is_dir() and shutil.which("nvidia-smi") is None:
        return []  # not gpu_count(): Ray hides the GPUs from actors that hold none, and the monitor only looks
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [_gpu(pynvml.nvmlDeviceGetName(h), pynvml.nvmlDeviceGetMemoryInfo(h)) for h in handles]
    finally:
        pynvml.nvmlShutdown()


def _gpu(name: str | bytes, memory: Any) -> dict[str, Any]:
    said = name.decode(errors="replace") if isinstance(name, bytes) else name  # by the age of NVML's binding
    return {"name": said, "used": int(memory.used), "total": int(memory.total)}


def default_devices() -> int:
    """Devices of this machine: its GPUs, else as many slots as cores this process may use."""
    return gpu_count() or len(os.sched_getaffinity(0))
