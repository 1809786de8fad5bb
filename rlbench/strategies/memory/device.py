"""The one place where a CPU host and a GPU host differ for a training rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch


@dataclass(frozen=True)
class RankDevice:
    """The device a rank computes on. On a host without a GPU the device is host memory."""

    device: torch.device

    @classmethod
    def pick(cls, local_rank: int, kind: str = "auto") -> RankDevice:
        """Choose by what is there (`kind="auto"`), or "cpu" / "cuda"; the rank's GPU becomes the current one. Ray hides
        those of other actors, so a rank may see one GPU whatever its local rank is."""
        if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
            return cls(torch.device("cpu"))
        index = local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return cls(torch.device("cuda", index))

    @property
    def is_gpu(self) -> bool:
        """True where device memory is not host memory."""
        return self.device.type == "cuda"

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU; None: the device is host memory."""
        return torch.cuda.get_device_capability(self.device) if self.is_gpu else None

    @property
    def memory(self) -> int:
        """Bytes of the GPU; 0: the device is host memory."""
        return int(torch.cuda.get_device_properties(self.device).total_memory) if self.is_gpu else 0

    def release_cache(self) -> None:
        """Give unused memory of the allocator back."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    def let_scripts_wait(self) -> None:
        """Let `torch.cuda.synchronize()`, which scripts call before they read the clock, return where there is no GPU:
        nothing is under way there that it could wait for, and torch would raise."""
        if not self.is_gpu and not torch.cuda.is_available():
            torch.cuda.synchronize = lambda device=None: None

    def rng_state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the random state of host and device."""
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device) if self.is_gpu else None

    def set_rng_state(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        """Put back what `rng_state` returned."""
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device)

    def allocated(self) -> dict[str, int]:
        """Return the bytes in use by this process: `rss` of the host, and `cuda` on a GPU."""
        used = {"rss": int(psutil.Process().memory_info().rss)}
        if self.is_gpu:
            used["cuda"] = int(torch.cuda.memory_allocated(self.device))
        return used

    def group_arguments(self) -> dict[str, Any]:
        """Return the arguments of `init_process_group` that depend on it; on a GPU a group for host memory is beside
        that of the device: there `fsdp_cpu_offload` keeps shards."""
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": self.device} if self.is_gpu else {"backend": "gloo"}
