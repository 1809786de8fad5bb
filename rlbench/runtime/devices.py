"""What this machine offers: GPUs where there are any, else slots that engines take turns on."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from rlbench.errors import ClusterError

PROC = Path("/proc/driver/nvidia/gpus")


@lru_cache(maxsize=1)
def gpu_count() -> int:
    """Return how many NVIDIA GPUs the driver shows and CUDA_VISIBLE_DEVICES allows; 0 where there is no driver."""
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
        raise ClusterError("nvidia-smi does not answer: check the driver, or set CUDA_VISIBLE_DEVICES") from None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def room_in_memory() -> int:
    """Return the bytes of host memory that are free now, and free for files in memory, of which a container may have
    few."""
    return min(int(psutil.virtual_memory().available), shutil.disk_usage("/dev/shm").free)


def gpu_memory() -> list[dict[str, Any]]:
    """Return `name`, `used` and `total` bytes of each GPU, all processes together; empty without a GPU."""
    if not PROC.is_dir() and shutil.which("nvidia-smi") is None:
        return []  # not gpu_count(): Ray hides the GPUs from actors that hold none, and the monitor only looks
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        memory = [(handle, pynvml.nvmlDeviceGetMemoryInfo(handle)) for handle in handles]
        return [{"name": pynvml.nvmlDeviceGetName(h), "used": int(m.used), "total": int(m.total)} for h, m in memory]
    finally:
        pynvml.nvmlShutdown()
