"""Where a replica's weights and KV cache are, the memory they take, its version and pause, and what that forbids."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from rlbench.dispatch.context import CallContext, bringing_back, this_engine
from rlbench.errors import StateError, WeightSyncError, nearest

TAGS = ("weights", "kv_cache")
STATES = ("cuda", "cpu", "meta")
LOOK_S = 0.1

SYNC = "a sync (session.sync_weights(), or p2p_weight_sync(…) on the train engine)"


@dataclass
class ReplicaState:
    """`weights`: cuda (resident), cpu (in host memory), meta (discarded), empty (room, no content) or torn (a sync
    failed half-way); `kv_cache`: cuda or meta; `pending`: weights were applied whose `version` was not committed;
    `token`: of the sync that brought the weights last, as its sender calls it, "" where something else did;
    `takes_parts`: False once some of the weights alone could not be taken, so that all come from then on."""

    weights: str = "cuda"
    kv_cache: str = "cuda"
    version: int = 0
    pending: bool = False
    token: str = ""
    takes_parts: bool = True

    @property
    def holds(self) -> str:
        """Token of the weights that are here whole and with a version, so proven; "": of none that a sender knows."""
        return self.token if self.weights == "cuda" and not self.pending and self.takes_parts else ""

    @property
    def places(self) -> dict[str, Any]:
        """Where weights and KV cache are, and the version."""
        return {"weights": self.weights, "kv_cache": self.kv_cache, "version": self.version}

    @property
    def status(self) -> dict[str, Any]:
        """What is told of it."""
        return {**self.places, "pending": self.pending, "holds": self.holds}

    @property
    def ready(self) -> bool:
        """Whether clients of an endpoint can be served."""
        return self.weights == self.kv_cache == "cuda" and not self.pending

    def require_ready(self, what: str, *, committed: bool = True) -> None:
        """Raise StateError, naming the call that mends it, unless the replica can compute; `committed`: with a
        version."""
        engine = this_engine()
        of, reload = f"the weights of {engine}", f"reload() on {engine}"
        wrong = {
            "cpu": f"{of} are offloaded: {bringing_back('weights')} first",
            "meta": f"{of} were discarded: {bringing_back()} reads them from the checkpoint; or "
            f"{bringing_back('weights')} and then {SYNC}",
            "empty": f"{of} have their room but nothing in it: {SYNC} fills it, or {reload}",
            "torn": f"a weight sync failed half-way, so {engine} holds a mixture: {SYNC} again, or {reload}",
        }.get(self.weights)
        if wrong is None and self.kv_cache != "cuda":
            wrong = f"the KV cache of {engine} is released: {bringing_back('kv_cache')} first"
        if wrong is None and committed and self.pending:
            wrong = (
                f"new weights were applied to {engine} but the sync did not end, so they have no version: {SYNC} "
                "again, or reload() on it"
            )
        if wrong is not None:
            raise StateError(f"{what}: {wrong}")

    def require_base(self, follows: str) -> None:
        """Refuse changes of weights that are not those held: of another sync than that of the token `follows`."""
        if follows and follows != self.holds:
            raise WeightSyncError(
                f"{this_engine()} does not hold the weights that these changes are of: it was given others meanwhile, "
                "which it keeps. Sync again, and all weights are sent"
            )

    def require_room(self, what: str) -> None:
        """Raise StateError unless weights can be written into the replica."""
        if self.weights in ("cpu", "meta"):
            raise StateError(
                f"{what}: the weights of {this_engine()} are on {self.weights}: {bringing_back('weights')} first"
            )


class Gate:
    """Open while generation may go on; the control lane closes it, the compute lane passes it between two steps."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    @property
    def closed(self) -> bool:
        """Whether generation is paused."""
        return not self._open.is_set()

    def close(self) -> None:
        """Hold whoever comes next."""
        self._open.clear()

    def open(self) -> None:
        """Let go."""
        self._open.set()

    def passes(self, context: CallContext) -> bool:
        """Wait, asleep, while it is closed; False once the call is asked to stop."""
        if self.closed:
            context.report(paused=True)
            while not self._open.wait(LOOK_S) and not context.stop_requested():
                continue
            context.report(paused=False)
        return not context.stop_requested()


def check_tags(state: str, tags: list[str] | None) -> set[str]:
    """Return the tags a state change is about (None: all). Raises StateError for an unknown state or tag."""
    if state not in STATES:
        raise StateError(f"no device state {state!r}: one of {', '.join(STATES)}{nearest(state, STATES)}")
    for tag in tags or ():
        if tag not in TAGS:
            raise StateError(f"no tag {tag!r} on an inference engine: {' or '.join(TAGS)}{nearest(tag, TAGS)}")
    return set(tags or TAGS)


def resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:  # a tensor parallel worker that ends just now
        return 0


def vllm_memory(
    workers: Sequence[Mapping[str, Any]], state: ReplicaState, pids: list[int], on_cpu: bool
) -> dict[str, Any]:
    """Return bytes by owner on the `device`, what `cpu` of each part `frees`, and resident memory, of a replica's
    `workers` as they describe themselves. `other` is on a host the rest of the resident memory, on a GPU its
    allocator's."""
    whole = sum(worker["weights"] for worker in workers)
    kv_cache = sum(_kv_resident(worker, state, on_cpu) for worker in workers)
    rss = sum(map(resident, pids))
    weights = 0 if not on_cpu and state.weights in ("cpu", "meta") else whole
    rest: dict[str, int] = {}
    if on_cpu:
        rest = {"other": max(0, rss - weights - kv_cache)}
    elif own_process(workers):
        import torch

        from rlbench.strategies.memory.owners import beyond

        whole_kv = sum(nbytes for _, nbytes in workers[0]["kv_ranges"])
        asleep = whole - weights + whole_kv - kv_cache  # vLLM unmaps their memory behind the allocator's back
        device = torch.device("cuda", torch.cuda.current_device())
        rest = beyond({"weights": whole, "kv_cache": whole_kv}, device)
        rest |= {name: max(0, rest[name] - asleep) for name in ("allocated", "reserved")}
    return {
        "device": "host" if on_cpu else "gpu",
        "weights": weights,
        "kv_cache": kv_cache,
        **rest,
        "rss": rss,
        "processes": len(pids),
        "frees": {"weights": 0 if on_cpu else weights, "kv_cache": kv_cache},
    }


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
        return sum(_resident_pages(address, nbytes) for address, nbytes in worker["kv_ranges"])
    return sum(nbytes for _, nbytes in worker["kv_ranges"]) if state.kv_cache == "cuda" else 0


def untouched_kv(workers: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes of KV caches in this process's own host memory that nothing was written to yet: blocks are used
    in turn, so all of them will be."""
    ours = [area for worker in workers if worker["pid"] == os.getpid() for area in worker["kv_ranges"]]
    return sum(nbytes - _resident_pages(address, nbytes) for address, nbytes in ours)


def _resident_pages(address: int, nbytes: int) -> int:
    """How many bytes of a range of this process's own memory are in RAM (`mincore`), in whole pages."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = max(0, (address + nbytes - start) // mmap.PAGESIZE)
    flags = np.zeros(pages, np.uint8)
    length, into = ctypes.c_size_t(pages * mmap.PAGESIZE), ctypes.c_void_p(flags.ctypes.data)
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(start), length, into) != 0:
        return 0  # unmapped in the meantime: the engine was closed
    return int(np.count_nonzero(flags & 1)) * mmap.PAGESIZE
