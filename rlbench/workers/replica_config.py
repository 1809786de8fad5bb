"""How an inference replica is built. No torch: the driver makes it, the replica reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlbench.errors import BuildError

DEFAULT_KV_BYTES = 1 << 30  # on a CPU host; unasked, vLLM would take 0.92 of the machine's memory


@dataclass(frozen=True)
class ReplicaConfig:
    """Options of one replica.

    Args:
        path: checkpoint folder or hub id, with its tokenizer.
        dtype: `float32`, `bfloat16`, `float16` or `auto` (the checkpoint's; vLLM turns float32 into bfloat16
            there, so give the trainer's dtype where log-probs are compared).
        tensor_parallel_size: processes one copy of the model is spread over; 1 stays in the replica's own
            process.
        kv_cache_bytes: size of the KV cache; None is 1 GiB on a CPU host and vLLM's own choice on a GPU.
        max_model_len: longest prompt plus response in tokens; None is the model's own limit.
        max_num_seqs: samples computed at the same time.
        seed: of the engine; samples have seeds of their own.
        threads: OpenMP threads of a CPU replica; None is all cores the process may use, divided by the tensor
            parallel size.
        enforce_eager: no torch.compile and no CUDA graphs: seconds instead of minutes to start.
        gpu_memory_utilization: share of the GPU's memory, where `kv_cache_bytes` is not given.
        engine_kwargs: further arguments of vLLM's `EngineArgs`, as they are.
    """

    path: str
    dtype: str = "auto"
    tensor_parallel_size: int = 1
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 128
    seed: int = 0
    threads: int | None = None
    enforce_eager: bool = True
    gpu_memory_utilization: float = 0.5
    trust_remote_code: bool = False
    engine_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise BuildError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("kv_cache_bytes", "max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BuildError(f"{name}={value} must be at least 1, or None for the default")
