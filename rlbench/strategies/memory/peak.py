"""The highest memory while a block runs, and how much there may be: of a GPU, or of processes on the host.

On a GPU: what torch's allocator handed out at most. On a host: the kernel's high-water mark of resident memory (shared
with others, too), set back when the block begins.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from rlbench.weights.memory import return_free_memory

SAMPLE_S = 0.005
RESET_PEAK = "5"  # proc(5), clear_refs: set the peak resident size back to the current one
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


class PeakMemory:
    """Measures a `with` block: `before`, `peak` in bytes, and `how`: where the kernel keeps no mark, by samples every
    few milliseconds, which may miss a short spike.

    Args:
        device: the GPU of this process; None or a CPU device: host memory.
        pids: the processes whose resident memory counts, added up; default: this one.
    """

    def __init__(self, device: torch.device | None = None, pids: Sequence[int] = ()) -> None:
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._pids = list(pids) or [os.getpid()]
        self._done = threading.Event()
        self._sampler: threading.Thread | None = None
        self._sampled = 0
        self.before = self.peak = 0
        self.how = ""

    def __enter__(self) -> PeakMemory:
        if self._gpu is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._gpu)
            self.before, self.how = int(torch.cuda.memory_allocated(self._gpu)), "the GPU allocator's peak"
            return self
        return_free_memory()  # what was freed before would hide the next rise
        self.before = self._resident()
        if _reset_high_water(self._pids):
            self.how = "the kernel's high-water mark of resident memory"
        else:
            self.how = f"resident memory sampled every {SAMPLE_S * 1000:.0f} ms"
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._gpu is not None:
            self.peak = int(torch.cuda.max_memory_allocated(self._gpu))
        elif self._sampler is not None:
            self._done.set()
            self._sampler.join()
            self.peak = max(self._sampled, self._resident())
        else:
            self.peak = _high_water(self._pids)

    def _resident(self) -> int:
        return sum(int(psutil.Process(pid).memory_info().rss) for pid in self._pids)

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self._sampled = max(self._sampled, self._resident())


@dataclass
class PassPeak:
    """The highest memory during a pass, `bytes`; None where it cannot be had for nothing."""

    bytes: int | None = None


@contextlib.contextmanager
def pass_peak(device: torch.device | None = None, pids: Sequence[int] = ()) -> Iterator[PassPeak]:
    """Measure a pass that must not be slowed: as `PeakMemory`, but nothing is trimmed and nothing sampled."""
    measured, own = PassPeak(), list(pids) or [os.getpid()]
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield measured
        measured.bytes = int(torch.cuda.max_memory_allocated(device))
    elif _reset_high_water(own):
        yield measured
        measured.bytes = _high_water(own)
    else:
        yield measured


def _reset_high_water(pids: Sequence[int]) -> bool:
    """Set the marks back; False where that cannot be: not on Linux, or not allowed in this container."""
    try:
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def _high_water(pids: Sequence[int]) -> int:
    """Return the peak resident bytes of processes since their marks were set back, added up."""
    lines = (line.split() for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(words[1]) << 10 for words in lines if words[0] == "VmHWM:")


def room(device: torch.device | None, sharing: int = 1) -> int:
    """Return the bytes that may still be taken: of the GPU, or this process's share of what the host (its cgroup) has
    left, where `sharing` processes grow at the same time."""
    if device is not None and device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    left = int(psutil.virtual_memory().available)
    for limit, used in CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such cgroup here, or "max": no limit
            left = min(left, max(0, int(limit.read_text()) - int(used.read_text())))
    return left // max(1, sharing)
