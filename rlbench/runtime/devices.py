"""What this machine offers: GPUs where there are any, else slots that engines take turns on."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache


@lru_cache(maxsize=1)
def gpu_count() -> int:
    """NVIDIA GPUs the driver shows and CUDA_VISIBLE_DEVICES allows; 0 where there is no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def default_devices() -> int:
    """Devices of this machine: its GPUs, else as many slots as cores this process may use."""
    return gpu_count() or len(os.sched_getaffinity(0))
