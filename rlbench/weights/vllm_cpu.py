"""vLLM's CPU worker with a sleep that gives host memory back: the stock one ignores `sleep` and `wake_up`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker  # first: it replaces what torch lacks without a GPU

from vllm.platforms import current_platform  # isort: skip
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod  # isort: skip

from rlbench.weights.memory import (
    UntouchedZeros,
    drop_pages,
    empty_parameters,
    keep_freed_pages,
    return_free_memory,
)
from rlbench.weights.vllm_cpu_lora import AdapterProducts
from rlbench.weights.vllm_norms import use_kernels
from rlbench.weights.vllm_plugin import ReplicaWorkerMixin, kv_storages
from rlbench.weights.vllm_sampling import draw_by_seeds


class CpuReplicaWorker(ReplicaWorkerMixin, CPUWorker):
    """A CPU worker that gives memory back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        keep_freed_pages()
        super().__init__(*args, **kwargs)
        if self.model_config.enforce_eager:  # else vLLM has operations of torch compiled together
            use_kernels()
        self._restore: list[Callable[[], None]] = []
        self._kernels: dict[UnquantizedFusedMoEMethod, Any] = {}

    def load_model(self, **options: Any) -> None:
        """As the mixin's, with our own products of adapters and draws."""
        current_platform.get_punica_wrapper = lambda: f"{AdapterProducts.__module__}.{AdapterProducts.__name__}"
        super().load_model(**options)
        draw_by_seeds(self.model_runner.sampler.topk_topp_sampler)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """As vLLM's, with a KV cache whose pages come as they are used."""
        return UntouchedZeros() if tag == "kv_cache" else super()._maybe_get_memory_pool_context(tag)  # type: ignore[no-any-return]

    def start_weight_update(self) -> None:
        """As vLLM's; the experts' kernels are made again from what comes."""
        self._kernels = forget_expert_kernels(self.model_runner.model)
        super().start_weight_update()

    def finish_weight_update(self) -> None:
        """As the mixin's; experts of which nothing came keep their kernels."""
        super().finish_weight_update()
        for experts, kernel in self._kernels.items():
            if experts.moe_kernel is None:
                experts.moe_kernel = kernel
        self._kernels = {}

    def reload_from_disk(self) -> None:
        """Load the checkpoint again (also after the weights were discarded)."""
        forget_expert_kernels(self.model_runner.model)
        super().reload_from_disk()

    def sleep(self, level: int = 1) -> None:
        """Level 1 keeps the weights (they are in host memory already), level 2 drops them too."""
        self.discard(("kv_cache",) if level == 1 else ("kv_cache", "weights"))

    def discard(self, tags: tuple[str, ...]) -> None:
        """Give back the memory of `tags`, a subset of weights and kv_cache. Their contents are lost."""
        if "kv_cache" in tags:
            for storage in kv_storages(self.model_runner):
                drop_pages(storage)
        if "weights" in tags and not self._restore:
            model = self.model_runner.model
            self._restore = empty_parameters(model)
            for module in model.modules():
                if hasattr(module, "cpu_linear"):  # holds the packed copy of the weight
                    module.cpu_linear = _discarded
            gc.collect()  # the packed copies are freed by destructors
        return_free_memory()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Make room again. KV pages come back by themselves; weights are undefined until loaded or synced."""
        if tags is None or "weights" in tags:
            for restore in self._restore:
                restore()
            self._restore = []


def forget_expert_kernels(model: torch.nn.Module) -> dict[UnquantizedFusedMoEMethod, Any]:
    """Have the next weights of each mixture of experts packed, as vLLM does only where it makes their kernel; return
    the kernels of before.

    The old kernel would read plain weights as packed ones, without an error.
    """
    found = [module for module in model.modules() if isinstance(module, UnquantizedFusedMoEMethod)]
    kernels = {experts: experts.moe_kernel for experts in found}
    for experts in found:
        experts.moe_kernel = None
    return kernels


def _discarded(*_: Any) -> torch.Tensor:
    raise RuntimeError("the weights were discarded: load or sync them before a forward pass")
