"""What there is to fit into: GPUs, or a host's memory; this machine's, or those that a text names."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlbench.errors import BuildError
from rlbench.runtime.devices import gpu_count, gpu_memory
from rlbench.units import GIB, format_bytes

NAMED = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(GiB|GB|G)", re.IGNORECASE)
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where a container's limit stands."""


@dataclass(frozen=True)
class Devices:
    """`gpus` of `nbytes` each; with 0 of them a host of so many bytes, which all processes share. `host`: bytes of the
    host beside the GPUs, None where nothing is known of it."""

    gpus: int
    nbytes: int
    host: int | None = None

    def __str__(self) -> str:
        return f"{self.gpus} x {format_bytes(self.nbytes)}" if self.gpus else f"a host of {format_bytes(self.nbytes)}"

    @classmethod
    def of(cls, given: str | Devices | None) -> Devices:
        """Read `"2x80GiB"`, `"24GiB"` (one GPU), `"0x24GiB"` (a host without one); None: this machine."""
        if isinstance(given, Devices):
            return given
        if given is None:
            host = host_memory()
            sizes = [int(gpu["total"]) for gpu in gpu_memory()][: gpu_count()] if gpu_count() else []
            return cls(len(sizes), min(sizes), host) if sizes else cls(0, host, host)
        found = NAMED.fullmatch(given.strip()) if isinstance(given, str) else None
        if found is None or float(found[2]) <= 0:
            raise BuildError(
                f'gpus={given!r}: "2x80GiB" are two GPUs, "0x24GiB" is a host without one, None this machine'
            )
        return cls(int(found[1] or 1), int(float(found[2]) * GIB))


def host_memory() -> int:
    """Bytes of this host that its processes may use: of its container, where that has a limit."""
    total = int(psutil.virtual_memory().total)
    for limit in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such group here, or "max": no limit
            total = min(total, int(limit.read_text()))
    return total
