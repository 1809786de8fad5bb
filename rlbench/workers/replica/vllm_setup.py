"""How vLLM is started inside a replica: environment, threads and engine arguments, in one place, with the reasons."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

from rlbench.errors import BuildError, nearest
from rlbench.weights import facts
from rlbench.workers.replica.config import DEFAULT_KV_BYTES, ReplicaConfig, compute_dtype

GPU_WORKER = "rlbench.weights.vllm_plugin.GpuReplicaWorker"
CPU_WORKER = "rlbench.weights.vllm_cpu.CpuReplicaWorker"
TRANSFER_BACKEND = "rlbench"


def thread_count(config: ReplicaConfig) -> int:
    """OpenMP threads per process of the replica."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // config.tensor_parallel_size)


def prepare_threads(config: ReplicaConfig) -> None:
    """Set what OpenMP reads when torch is loaded (so call it before): how many threads, and that they do not
    spin.

    Ray sets OMP_NUM_THREADS=1 in actors, and vLLM falls back to one thread when nobody set it. Threads that
    wait by spinning cost nothing alone, but next to another busy process they take the cores it needs: 64
    requests of 64 tokens on two loaded cores fell from 14k to 2k tokens/s with GNU OpenMP's default, and
    stayed above 5k with `passive`; with `active` an idle replica burns a whole core.
    """
    os.environ["OMP_NUM_THREADS"] = str(thread_count(config))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def prepare_environment(config: ReplicaConfig) -> None:
    """Set what vLLM and OpenMP read from the environment; must run before vllm is imported in this process.

    - The engine core runs in this process: the caller's thread steps it, and one replica is one process (with
      tensor parallelism: plus one worker process per rank, which ends when this process does).
    - torch.compile: with enforce_eager vLLM still compiles a few helpers of the sampler at the first request,
      which costs 20 s on two cores and needs a C++ compiler; eager they run as fast.
    - Addresses: all processes of a replica are on one machine, and meet on its loopback interface.
    - Logging: warnings about missing preload libraries and the like would show in the user's cell at each
      start.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # what it says before it reads that
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_HOST_IP", facts.LOOPBACK)
    facts.keep_gloo_on(facts.LOOPBACK)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*reduce_op")
    prepare_threads(config)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _thread_binding(config))
    if config.enforce_eager:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        if "torch._dynamo.config" in sys.modules:
            sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]


def use_threads(count: int) -> None:
    """Give the calling thread `count` OpenMP threads: the number belongs to the thread that starts parallel work."""
    import torch

    torch._C.set_num_threads(count)  # vLLM replaces torch.set_num_threads by a function that only warns


def engine_args(config: ReplicaConfig) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs`. One place decides what differs between CPU and GPU."""
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": config.path,
        "dtype": compute_dtype(config, on_gpu=not on_cpu),
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": config.seed,
        "enforce_eager": config.enforce_eager,
        "trust_remote_code": config.trust_remote_code,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # The log-prob that belongs to a sampled token is that of the distribution it was drawn from: after
        # temperature, penalties, top-k, top-p and min-p.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=TRANSFER_BACKEND),
        "worker_cls": CPU_WORKER if on_cpu else GPU_WORKER,
        "kv_cache_memory_bytes": config.kv_cache_bytes or (DEFAULT_KV_BYTES if on_cpu else None),
    }
    if config.tensor_parallel_size > 1:  # inside an actor vLLM would ask Ray for its workers; they are our children
        arguments["distributed_executor_backend"] = "mp"
    if on_cpu:
        # A prefill that is cut in two draws a token too many, which vLLM takes back by the generator's offset; a
        # CPU generator has none, so a step with more prompt tokens than its budget (2048) would fail.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        arguments["enable_sleep_mode"] = True
    _check_engine_kwargs(config.engine_kwargs, arguments)
    return {**arguments, **config.engine_kwargs}


def _thread_binding(config: ReplicaConfig) -> str:
    """Cores for each tensor parallel worker: "0,2|1,3". vLLM's own "auto" needs one NUMA node per worker. A single
    process is not bound: it shares its cores with trainers."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = config.tensor_parallel_size
    if ranks == 1 or ranks > len(cores):
        return "nobind"
    return "|".join(",".join(str(core) for core in cores[rank::ranks]) for rank in range(ranks))


def _check_engine_kwargs(given: dict[str, Any], ours: dict[str, Any]) -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for name in given:
        if name not in known:
            raise BuildError(f"engine_kwargs: vLLM has no engine argument {name!r}{nearest(name, known)}")
        if name in ours:
            raise BuildError(f"engine_kwargs: {name!r} is set by the replica; use the replica's own option for it")


def checkpoint_folder(config: ReplicaConfig) -> str:
    """The folder the engine loaded from: the path itself, or the hub's local copy of it."""
    if os.path.isdir(config.path):
        return config.path
    from huggingface_hub import snapshot_download

    return snapshot_download(config.path, local_files_only=True)
