"""What a strategy's ranks say to each other and to the reader: reduce, gather, print, seed, report memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlbench.errors import EngineError
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.ranks.control import ControlGroup

OPS = {"mean": "SUM", "sum": "SUM", "max": "MAX", "min": "MIN"}
GB = 1e9


class RankSide:
    """Of one rank: `rank`, `world_size`, its `device`, and `control`, a group beside the model's own."""

    rank: int
    world_size: int
    seed: int
    device: RankDevice
    control: ControlGroup

    def is_rank_0(self) -> bool:
        """True on the first rank."""
        return self.rank == 0

    def get_rank(self) -> int:
        """This rank's number."""
        return self.rank

    def print(self, *values: Any) -> None:
        """Print with the time, on rank 0 alone."""
        if self.is_rank_0():
            print(f"[StrategyINFO {datetime.now():%m-%d %H:%M:%S}] ", *values, flush=True)

    def set_seed(self, seed: int | None = None) -> None:
        """Seed torch, numpy and random alike on all ranks; by default with the strategy's seed."""
        import numpy as np

        chosen = self.seed if seed is None else seed
        random.seed(chosen)
        np.random.seed(chosen % 2**32)
        torch.manual_seed(chosen)

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Reduce over all ranks; collective. The argument is left as it is.

        Args:
            data: a number, a tensor, or a dict of such with the same keys in the same order on all ranks.
            op: "mean", "sum", "max" or "min".

        Returns:
            The like of `data`, on its device. A mean of whole numbers is a float.
        """
        if op not in OPS:
            raise EngineError(f"op={op!r}: all_reduce knows mean, max, sum and min.")
        if isinstance(data, Mapping):
            return {key: self.all_reduce(value, op) for key, value in data.items()}
        tensor = data.detach().clone() if isinstance(data, Tensor) else torch.tensor(data, dtype=torch.float64)
        tensor = tensor.to(self.device.device)
        if self.world_size > 1:
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, OPS[op]))
        if op == "mean":
            tensor = tensor / self.world_size
        if isinstance(data, Tensor):
            return tensor.to(data.device)
        return int(tensor) if isinstance(data, int) and op != "mean" else float(tensor)

    def all_gather(self, data: Any) -> Any:
        """Join what the ranks have, in their order; collective.

        Args:
            data: a tensor (joined along the first dimension, whose lengths may differ; a single value becomes a row of
                them), a number, or a dict of such.

        Returns:
            The joined tensor on the device of `data`; a list for a number; a dict for a dict.
        """
        if isinstance(data, Mapping):
            return {key: self.all_gather(value) for key, value in data.items()}
        if not isinstance(data, Tensor):
            return [type(data)(value) for value in self.control.gather(data)]
        tensor = data.detach().reshape(1) if data.dim() == 0 else data.detach()
        if self.world_size == 1:
            return tensor.clone()
        lengths = self.control.gather(len(tensor))
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]), device=self.device.device)
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        return whole.to(data.device)

    def barrier(self) -> None:
        """Wait until all ranks are here; collective."""
        self.control.gather(None)

    def report_memory(self, prefix: str = "") -> dict[str, int]:
        """Print (rank 0) and return what memory is used, in bytes.

        On a GPU `driver_used` of it by all processes and `allocated` by this one's tensors; on a host without a GPU
        `host_used` by all processes and this process's `rss`, and the line says so.
        """
        if self.device.is_gpu:
            free, total = torch.cuda.mem_get_info(self.device.device)
            found = {"driver_used": int(total - free), **self.device.allocated()}
            found["allocated"] = found.pop("cuda")
            said = ("DRIVER_USED", "driver_used"), ("ALLOCATED", "allocated")
        else:
            found = {"host_used": int(psutil.virtual_memory().used), **self.device.allocated()}
            said = ("HOST_USED", "host_used"), ("RSS", "rss")
        if self.is_rank_0():
            parts = ", ".join(f"{label}={found[name] / GB:.2f} GB" for label, name in said)
            print(f"MEMORY STATUS: {prefix}, {parts}", flush=True)
        return found

    def sync_and_clear_cache(self) -> None:
        """Wait for the device, drop unreachable objects, and give memory that nothing uses back."""
        from rlbench.weights.memory import return_free_memory

        if self.device.is_gpu:
            torch.cuda.synchronize(self.device.device)
        gc.collect()
        self.device.release_cache()
        return_free_memory()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The model inside a wrapper that calls it `module` (DistributedDataParallel, …); else the model itself."""
        inner = getattr(model, "module", None)
        return inner if isinstance(inner, nn.Module) else model
