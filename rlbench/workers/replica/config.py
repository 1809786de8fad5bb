"""How an inference replica is built. No torch: the driver makes it, the replica reads it."""

from __future__ import annotations

import os
from typing import Any

from rlbench.defaults import NO_PREFIXES, Default, cache_size, eager, precision
from rlbench.options import OptionError, Options, section

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
        None, "size of the KV cache; None: 1 GiB on a CPU, vLLM's own on a GPU", least=1
    )
    max_model_len: int | None = replica(None, "longest prompt plus response in tokens; None: the model's own", least=1)
    max_num_seqs: int = replica(128, "samples computed at the same time", least=1)
    threads: int | None = replica(None, "OpenMP threads on a CPU; None: its cores / tensor_parallel_size", least=1)
    adapters: int = replica(
        0,
        "LoRA adapters held beside each other, by kernels of vLLM's; 0: a trainer's come merged into the weights",
        least=0,
    )
    adapter_rank: int = replica(32, "largest rank of an adapter", least=1, needs={"adapters": 0})
    delta: bool = replica(
        False,
        "weights come by broadcast as differences to those before, which each worker of a replica and the sending rank "
        "keep in host memory (docs/cluster.md)",
    )
    return_routed_experts: bool = replica(
        False,
        "rollouts bring the experts that each token took, of a mixture of experts (docs/models.md); "
        "rb.Train(router_replay=True) switches it on",
    )
    enforce_eager: bool | None = replica(
        None,
        "no torch.compile and no CUDA graphs; None: so on a CPU, where compiling takes longer than it gains, not on a "
        "GPU, where the graphs are most of the speed",
    )
    gpu_memory_utilization: float = replica(0.5, "share of the GPU's memory, where kv_cache_bytes is not given")
    trust_remote_code: bool = replica(False, "run code that lies in the checkpoint's folder")
    models: dict[str, Any] = replica(
        dict, "own model classes for vLLM, by the architecture that config.json names: file.py:Class or module:Class"
    )
    engine_kwargs: dict[str, Any] = replica(dict, "further arguments of vLLM's EngineArgs, as they are")

    def __post_init__(self) -> None:
        super().__post_init__()
        places = {name: _absolute(place) for name, place in self.models.items()}  # a worker runs in another folder
        object.__setattr__(self, "models", places)
        if self.models and self.tensor_parallel_size > 1:
            raise OptionError(
                f"models= cannot be honoured with tensor_parallel_size={self.tensor_parallel_size}: vLLM's workers are "
                "processes of their own, which do not know the classes; install a package with a plugin of vLLM's."
            )
        if self.delta and self.adapters:
            raise OptionError(
                f"delta=True has nothing to gain with adapters={self.adapters}: an adapter travels alone, and all of "
                "it changes; leave one of them out."
            )
        split = {"tensor_parallel_size": self.tensor_parallel_size > 1, "adapters": self.adapters > 0}
        if self.return_routed_experts and (other := next((name for name, on in split.items() if on), None)):
            raise OptionError(
                f"return_routed_experts=True, which rb.Train(router_replay=True) asks for too, cannot be honoured with "
                f"{other}={getattr(self, other)}: experts are recorded in one process, without adapters; leave one of "
                "them out."
            )


def _absolute(place: Any) -> str:
    module, separator, kind = str(place).rpartition(":")
    if not (module and kind.isidentifier()):
        raise OptionError(f"models: {place!r} names no class; write file.py:Class or module:Class.")
    return f"{os.path.abspath(module)}{separator}{kind}" if module.endswith(".py") else place


class ReplicaConfig(ReplicaOptions, kw_only=False):
    """`path`: checkpoint folder or hub id, with its tokenizer; `seed`: of the engine, samples have their own."""

    path: str
    seed: int = 0


def compute_dtype(config: ReplicaConfig, gpu: tuple[int, int] | None) -> str:
    """Return what a replica computes in on a GPU of this compute capability (None: on the host); by default, what a
    `TrainEngine` of the checkpoint does."""
    if config.dtype != "auto":
        return config.dtype
    held = ""
    if gpu is None:
        from transformers import AutoConfig

        read = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
        held = str(read.get_text_config().dtype).removeprefix("torch.")
    return precision(gpu, held).dtype("float32")


def runs_eagerly(config: ReplicaConfig, on_gpu: bool) -> bool:
    """Return whether a replica computes without compiling and CUDA graphs."""
    return not on_gpu if config.enforce_eager is None else config.enforce_eager


def defaults(config: ReplicaConfig, on_gpu: bool, hybrid: bool = False) -> list[Default]:
    """Return what was chosen for a replica where its options do not say; `hybrid`: some of its layers recur."""
    chosen = [eager(on_gpu)] if config.enforce_eager is None else []
    chosen += [NO_PREFIXES] if hybrid and not on_gpu and NO_PREFIXES.option not in config.engine_kwargs else []
    return [*chosen, cache_size(on_gpu, config.gpu_memory_utilization)] if config.kv_cache_bytes is None else chosen


def checkpoint_folder(config: ReplicaConfig) -> str:
    """Return the folder the engine loaded from: the path itself, or the hub's local copy of it."""
    if os.path.isdir(config.path):
        return config.path
    from huggingface_hub import snapshot_download

    return snapshot_download(config.path, local_files_only=True)
