"""How an inference replica is built. No torch: the driver makes it, the replica reads it."""

from __future__ import annotations

from typing import Any

from rlbench.options import Options, section

DEFAULT_KV_BYTES = 1 << 30  # on a CPU host; unasked, vLLM would take 0.92 of the machine's memory


replica = section("Replica")


class ReplicaOptions(Options):
    """How a replica is built, whatever its model; what `rb.Inference` takes as well."""

    dtype: str = replica(
        "auto",
        "float32, bfloat16, float16, or auto: what a trainer of the same checkpoint computes in, so that their "
        "log-probs can be compared",
    )
    tensor_parallel_size: int = replica(1, "devices one copy of the model is spread over", least=1)
    kv_cache_bytes: int | None = replica(
        None, "size of the KV cache; None: 1 GiB on a CPU host, vLLM's own choice on a GPU", least=1
    )
    max_model_len: int | None = replica(
        None, "longest prompt plus response in tokens; None: the model's own limit", least=1
    )
    max_num_seqs: int = replica(128, "samples computed at the same time", least=1)
    threads: int | None = replica(
        None, "OpenMP threads of a CPU replica; None: the process's cores / tensor_parallel_size", least=1
    )
    enforce_eager: bool = replica(True, "no torch.compile and no CUDA graphs: seconds instead of minutes to start")
    gpu_memory_utilization: float = replica(0.5, "share of the GPU's memory, where kv_cache_bytes is not given")
    trust_remote_code: bool = replica(False, "run code that lies in the checkpoint's folder")
    engine_kwargs: dict[str, Any] = replica(dict, "further arguments of vLLM's EngineArgs, as they are")


class ReplicaConfig(ReplicaOptions, kw_only=False):
    """Options of one replica.

    Args:
        path: checkpoint folder or hub id, with its tokenizer.
        seed: of the engine; samples have seeds of their own.
    """

    path: str
    seed: int = 0


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
