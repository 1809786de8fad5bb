"""How vLLM is started inside a replica: environment, threads and engine arguments, in one place, with the reasons."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from rlbench.data.base.routing import check_family
from rlbench.defaults import KV_BYTES, NO_PREFIXES
from rlbench.dispatch.context import current
from rlbench.errors import BuildError, RLBenchError, nearest
from rlbench.user_code import user_code
from rlbench.weights import facts
from rlbench.workers.replica.config import ReplicaConfig, compute_dtype, runs_eagerly

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

GPU_WORKER = "rlbench.weights.vllm_plugin.GpuReplicaWorker"
CPU_WORKER = "rlbench.weights.vllm_cpu.CpuReplicaWorker"
TRANSFER_BACKEND = "rlbench"
HOST_BLOCK = 32
"""Tokens of a block of the KV cache on a CPU, whose kernel takes multiples of this."""
T = TypeVar("T")


def thread_count(config: ReplicaConfig) -> int:
    """OpenMP threads per process of the replica."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // config.tensor_parallel_size)


def prepare_environment(config: ReplicaConfig) -> None:
    """Set what vLLM and OpenMP read from the environment, before vllm is imported: the engine core in this process, on
    the loopback interface, with errors alone in the user's cell; no compiling where it runs eagerly (20 s at the first
    request)."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # what it says before it reads that
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_HOST_IP", facts.LOOPBACK)
    facts.keep_gloo_on(facts.LOOPBACK)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*reduce_op")
    os.environ["OMP_NUM_THREADS"] = str(thread_count(config))  # torch reads it when it is loaded; Ray sets one
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _thread_binding(config))
    if "torch._inductor.config" in sys.modules:  # as vLLM sets it where it is imported before torch
        sys.modules["torch._inductor.config"].compile_threads = 1  # type: ignore[attr-defined]
    import torch

    if runs_eagerly(config, on_gpu=torch.cuda.device_count() > 0):
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        if "torch._dynamo.config" in sys.modules:
            sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]


def start_engine(config: ReplicaConfig) -> LLMEngine:
    """Start the engine of a process whose environment is prepared, on the calling thread; BuildError where vLLM
    cannot."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from rlbench.weights.vllm_names import named_locks, unname_shared_memory
    from rlbench.weights.vllm_sampling import allocate_by_blocks, record_sampled_alone

    check_routing(config)
    use_threads(thread_count(config))
    if config.tensor_parallel_size == 1:
        inspect_models_here()
    register_models(config.models)
    record_sampled_alone()
    allocate_by_blocks()
    current().report(phase="building vLLM: weights, KV cache")
    others = named_locks()
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**engine_args(config)))
    except RLBenchError:
        raise
    except Exception as error:
        raise BuildError(f"vLLM could not start on {config.path!r}: {error}") from error
    if config.tensor_parallel_size > 1:
        engine.collective_rpc("unname_shared_memory")
        unname_shared_memory(engine.model_executor.rpc_broadcast_mq, but=others)  # type: ignore[attr-defined]
    return engine


def use_threads(count: int) -> None:
    """Give the calling thread `count` OpenMP threads: the number belongs to the thread that starts parallel work."""
    import torch

    torch._C.set_num_threads(count)  # vLLM replaces torch.set_num_threads by a function that only warns


@contextmanager
def threads_for_now(count: int, usual: int) -> Iterator[None]:
    """Let the calling thread compute with `count` OpenMP threads, and then with the `usual` number again."""
    if count == usual:
        yield
        return
    use_threads(count)
    try:
        yield
    finally:
        use_threads(usual)


def inspect_models_here() -> None:
    """Have vLLM look at a model's class in this process, which computes with it anyway. Where it has no notes of a
    class on disk, as in the first session with an architecture, it would import itself in another process for that
    (8 s), lest a parent of workers starts CUDA: so not where workers are children of this one."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = _run_here


def _run_here(look: Callable[[], T]) -> T:
    return look()


def check_routing(config: ReplicaConfig) -> None:
    """Refuse to record experts of a model whose routers a trainer could not give them."""
    if config.return_routed_experts:
        from transformers import AutoConfig

        read = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
        check_family("return_routed_experts", config.path, read.model_type)


def register_models(models: Mapping[str, str]) -> None:
    """Let vLLM know the user's classes by the architectures that they are of."""
    from vllm import ModelRegistry

    for architecture, place in models.items():
        module, _, kind = place.rpartition(":")
        try:
            with user_code():
                found = getattr(_imported(module), kind)
        except Exception as error:
            raise BuildError(
                f"models={{{architecture!r}: {place!r}}} cannot be imported ({type(error).__name__}: {error}); a file "
                "must be there, and a module importable, where the replica runs"
            ) from error
        ModelRegistry.register_model(architecture, found)


def _imported(place: str) -> Any:
    """Import a module, or a file, beside which others are found as beside a script."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    folder, name = os.path.split(place)
    if folder not in sys.path:
        sys.path.append(folder)  # last: a file of the user's hides no module of another's
    found = importlib.import_module(name.removesuffix(".py"))
    if (file := str(found.__file__)) != place and os.path.realpath(file) != os.path.realpath(place):
        raise ImportError(f"{file} has its name already: rename it")
    return found


def engine_args(config: ReplicaConfig) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`. One place decides what differs between CPU and GPU."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": config.path,
        "dtype": compute_dtype(config, None if on_cpu else _capability()),
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": config.seed,
        "enforce_eager": runs_eagerly(config, on_gpu=not on_cpu),
        "trust_remote_code": config.trust_remote_code,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        # The log-prob that belongs to a sampled token is that of the distribution it was drawn from: after
        # temperature, penalties, top-k, top-p and min-p.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=TRANSFER_BACKEND),
        "worker_cls": CPU_WORKER if on_cpu else GPU_WORKER,
        "kv_cache_memory_bytes": config.kv_cache_bytes or (KV_BYTES if on_cpu else None),
        # A cache of processed images takes what was processed for sent to the engine, and its two ends drift apart
        # where a request is refused in between, or caches are reset. Samples of a prompt share what is processed once.
        "mm_processor_cache_gb": 0,
    }
    if config.adapters:
        arguments |= {"enable_lora": True, "max_loras": config.adapters, "max_lora_rank": _kernel_rank(config)}
        arguments["enable_tower_connector_lora"] = True  # of models that see; without, vLLM drops what is of the tower
    if config.tensor_parallel_size > 1:  # inside an actor vLLM would ask Ray for its workers; they are our children
        arguments["distributed_executor_backend"] = "mp"
    if on_cpu:
        # A prefill that is cut in two draws a token too many, which vLLM takes back by the generator's offset; a
        # CPU generator has none, so a step with more prompt tokens than its budget (2048) would fail.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        arguments["enable_sleep_mode"] = True
        arguments["enable_return_routed_experts"] = config.return_routed_experts
    _check_engine_kwargs(config.engine_kwargs, arguments)
    arguments |= config.engine_kwargs
    return arguments | (_for_a_host(EngineArgs(**arguments).create_model_config(), arguments) if on_cpu else {})


def _for_a_host(model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model's attention asks for on a CPU, of vLLM's `ModelConfig`, where it is not said."""
    if model.is_hybrid:
        return {} if NO_PREFIXES.option in arguments else {NO_PREFIXES.option: False}
    # vLLM's own are of 128 tokens: a shorter prompt, or what goes on from it, would be found in no prefix cache.
    return {} if model.use_mla or "block_size" in arguments else {"block_size": HOST_BLOCK}


def _capability() -> tuple[int, int]:
    """Return the compute capability of this process's GPU, by vLLM, which does not start CUDA for it."""
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    if found is None:
        raise BuildError("vLLM cannot tell the GPU's compute capability; say what to compute in: rb.Inference(dtype=…)")
    return found.major, found.minor


def _kernel_rank(config: ReplicaConfig) -> int:
    """Return the least rank that vLLM has kernels for and that holds an adapter of `adapter_rank`."""
    from vllm.config.lora import MaxLoRARanks

    ranks = typing.get_args(MaxLoRARanks)
    if config.adapter_rank > ranks[-1]:
        raise BuildError(
            f"adapter_rank={config.adapter_rank}: vLLM computes adapters up to rank {ranks[-1]}. Leave adapters= out, "
            "and they are sent merged into the weights"
        )
    return int(next(rank for rank in ranks if rank >= config.adapter_rank))


def _thread_binding(config: ReplicaConfig) -> str:
    """Cores of each tensor parallel worker, "0,2|1,3": vLLM's "auto" needs a NUMA node for each."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = config.tensor_parallel_size
    if ranks == 1 or ranks > len(cores):
        return "nobind"
    return "|".join(",".join(str(core) for core in cores[rank::ranks]) for rank in range(ranks))


def _check_engine_kwargs(kwargs: dict[str, Any], ours: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for name in kwargs:
        if name not in known:
            raise BuildError(f"engine_kwargs: vLLM has no engine argument {name!r}{nearest(name, known)}")
        if name in ours:
            raise BuildError(f"engine_kwargs: {name!r} is set by the replica; use the replica's own option for it")
