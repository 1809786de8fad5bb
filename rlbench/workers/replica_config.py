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
        dtype: `float32`, `bfloat16`, `float16`, or `auto`: what a trainer of the same checkpoint computes in, so that
            their log-probs can be compared (`compute_dtype`).
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


def compute_dtype(config: ReplicaConfig, on_gpu: bool) -> str:
    """What a replica computes in.

    Unless told otherwise that is what a `TrainEngine` of the checkpoint computes in: bfloat16 on a GPU; on a host
    without, bfloat16 for a checkpoint in bfloat16, else float32.
    """
    if config.dtype != "auto":
        return config.dtype
    if on_gpu:
        return "bfloat16"
    from transformers import AutoConfig

    held = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code).get_text_config().dtype
    return "bfloat16" if str(held).endswith("bfloat16") else "float32"
