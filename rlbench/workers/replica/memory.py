"""What a replica's memory holds, by owner: cheap enough to be asked for while it generates. No verb, nothing waits."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlbench.workers.replica.state import ReplicaState


def vllm_memory(
    workers: Sequence[Mapping[str, Any]], state: ReplicaState, pids: list[int], on_cpu: bool
) -> dict[str, Any]:
    """`memory_by_owner` of a vLLM replica.

    Args:
        workers: what each of its workers said of itself (`ReplicaWorkerMixin.describe`).
        pids: all its processes.
    """
    whole = sum(worker["weights"] for worker in workers)
    kv_cache = sum(_kv_resident(worker, state, on_cpu) for worker in workers)
    if on_cpu:
        return memory_by_owner(whole, kv_cache, pids)
    weights = 0 if state.weights in ("cpu", "meta") else whole
    gpu: dict[str, int] = {}
    if own_process(workers):
        whole_kv = sum(nbytes for _, nbytes in workers[0]["kv_ranges"])
        gpu = allocator(whole, whole_kv, whole - weights + whole_kv - kv_cache)
    return memory_by_owner(weights, kv_cache, pids, gpu)


def own_process(workers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the one worker of a replica runs in this process."""
    return [worker["pid"] for worker in workers] == [os.getpid()]


@contextmanager
def peak_stats(stats: dict[str, float], pids: Sequence[int], on_cpu: bool, own: bool) -> Iterator[None]:
    """Put the highest memory of a pass into `stats` as `peak_bytes`: of all `pids` on a host, of this process's GPU."""
    if not on_cpu and not own:
        yield  # its GPUs belong to other processes
        return
    import torch  # here: what it reads of the environment is set before the replica is built

    from rlbench.strategies.memory.peak import pass_peak

    device = None if on_cpu else torch.device("cuda", torch.cuda.current_device())
    with pass_peak(device, pids) as measured:
        yield
    if measured.bytes is not None:
        stats["peak_bytes"] = float(measured.bytes)


def _kv_resident(worker: Mapping[str, Any], state: ReplicaState, on_cpu: bool) -> int:
    """KV bytes of one worker: looked up page by page where it is this process, else its size while it is awake."""
    if on_cpu and worker["pid"] == os.getpid():
        return sum(resident_bytes(address, nbytes) for address, nbytes in worker["kv_ranges"])
    return sum(nbytes for _, nbytes in worker["kv_ranges"]) if state.kv_cache == "cuda" else 0


def rss_bytes(pid: int | str = "self") -> int:
    """Resident bytes of a process, read from /proc (0 when it is gone)."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def resident_bytes(address: int, nbytes: int) -> int:
    """How much of a range of this process's own memory is in RAM (`mincore`), in whole pages."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (address + nbytes - start) // mmap.PAGESIZE
    if pages <= 0:
        return 0
    flags = np.empty(pages, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_size_t(pages * mmap.PAGESIZE)
    if libc.mincore(ctypes.c_void_p(start), length, ctypes.c_void_p(flags.ctypes.data)) != 0:
        return 0  # unmapped in the meantime: the engine was closed
    return int(np.count_nonzero(flags & 1)) * mmap.PAGESIZE


def memory_by_owner(
    weights: int, kv_cache: int, pids: list[int], gpu: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Bytes by owner on the `device` ("host" or "gpu"), what `cpu` of each part `frees`, resident memory `rss`.

    Args:
        weights, kv_cache: bytes resident on the device.
        pids: processes of the replica.
        gpu: on a GPU what its allocator says (`strategies.memory.owners.beyond`), empty where it is not this
            process's own; None on a host without. There `other` is the rest of the resident memory, and `cpu`
            frees what can be rebuilt alone: the KV cache.
    """
    rss = sum(rss_bytes(pid) for pid in pids)
    rest = {"other": max(0, rss - weights - kv_cache)} if gpu is None else gpu
    frees = {"weights": 0 if gpu is None else weights, "kv_cache": kv_cache}
    return {
        "device": "host" if gpu is None else "gpu",
        "weights": weights,
        "kv_cache": kv_cache,
        **rest,
        "rss": rss,
        "processes": len(pids),
        "frees": frees,
    }


def allocator(weights: int, kv_cache: int, asleep: int) -> dict[str, int]:
    """What this process's GPU allocator holds beside weights and KV cache, for `memory_by_owner`.

    Args:
        weights, kv_cache: bytes of their tensors, resident or not.
        asleep: … of those that are released: vLLM unmaps their memory behind the allocator's back.
    """
    import torch

    from rlbench.strategies.memory.owners import beyond

    found = beyond({"weights": weights, "kv_cache": kv_cache}, torch.device("cuda", torch.cuda.current_device()))
    return found | {name: max(0, found[name] - asleep) for name in ("allocated", "reserved")}
