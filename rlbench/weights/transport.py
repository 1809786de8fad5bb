"""Which way weights take from a trainer to its replicas: facts of both sides in, a choice out. No torch, no process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlbench.errors import WeightSyncError, nearest

TRANSPORTS = ("shm", "ipc", "broadcast")


class PeerFailed(WeightSyncError):
    """This side gave up because another one failed; `secondary` says so to whoever looks for the cause."""

    secondary = True


@dataclass(frozen=True)
class Facts:
    """Where one training rank, or one replica, is.

    Attributes:
        node: what processes have in common that see one shared memory.
        address: by which other nodes reach this one.
        gpus: uuid of the GPU of each of its worker processes; empty on a host without a GPU.
        workers: its worker processes that take part in a sync (a tensor parallel replica has several).
        channels: broadcast groups it is in: the token by the other side's name (of a replica: by `""`).
    """

    node: str
    address: str
    gpus: tuple[str, ...] = ()
    workers: int = 1
    channels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Choice:
    """How weights travel. `senders`: the training ranks that write or send. `backend`: of a broadcast's group."""

    transport: str
    senders: tuple[int, ...] = (0,)
    backend: str = ""


def choose(train: Sequence[Facts], infer: Sequence[Facts], asked: str | None = None) -> Choice:
    """Choose the transport, or check the one that was asked for.

    One node without GPUs: `shm`. Every replica worker's GPU also holds a training rank: `ipc`. Everything else:
    `broadcast`; where that cannot be (NCCL takes a GPU once, and here every training rank's is a replica's too) and
    both sides are on one node: `shm`.

    Args:
        train: of each training rank, by rank.
        infer: of each replica.
        asked: a transport by name; None: choose.

    Raises:
        WeightSyncError: the transport that was asked for cannot work, or none can; naming what would.
    """
    if asked is not None and asked not in TRANSPORTS:
        raise WeightSyncError(
            f"transport={asked!r}{nearest(asked, TRANSPORTS)}; there are {', '.join(TRANSPORTS)}, and None chooses"
        )
    found = {"shm": _shm(train, infer), "ipc": _ipc(train, infer), "broadcast": _broadcast(train, infer)}
    works = {name: choice for name, choice in found.items() if isinstance(choice, Choice)}
    if asked is not None:
        if asked not in works:
            instead = f", or leave transport out to take {_best(works, train, infer)!r}" if works else ""
            raise WeightSyncError(f"transport={asked!r} cannot work here: {found[asked]}{instead}")
        return works[asked]
    if not works:
        why = "; ".join(f"{name}: {reason}" for name, reason in found.items())
        raise WeightSyncError(f"no transport reaches these replicas from this trainer. {why}")
    return works[_best(works, train, infer)]


def _best(works: dict[str, Choice], train: Sequence[Facts], infer: Sequence[Facts]) -> str:
    """The fastest of those that work: on GPUs not through host memory, on CPUs not through sockets."""
    on_gpus = all(side.gpus for side in (*train, *infer))
    order = ("ipc", "broadcast", "shm") if on_gpus else ("shm", "broadcast")
    return next(name for name in order if name in works)


def _shm(train: Sequence[Facts], infer: Sequence[Facts]) -> Choice | str:
    if any(replica.node != train[0].node for replica in infer):
        return 'trainer and replicas share no memory, they are on several nodes: use transport="broadcast"'
    return Choice("shm")


def _ipc(train: Sequence[Facts], infer: Sequence[Facts]) -> Choice | str:
    """One exporting rank for each GPU that a replica worker computes on: a handle is good on its own GPU alone."""
    if not all(side.gpus for side in (*train, *infer)):
        return 'CUDA IPC needs trainer and replicas on GPUs: use transport="shm" on a host without'
    first = {facts.gpus[0]: rank for rank, facts in reversed(list(enumerate(train)))}
    wanted = [gpu for replica in infer for gpu in replica.gpus]
    alone = [gpu for gpu in wanted if gpu not in first]
    if alone:
        return (
            f"{len(alone)} of {len(wanted)} replica workers are on a GPU without a training rank ({alone[0]}): build "
            "with colocate_with=, on as many GPUs"
        )
    return Choice("ipc", tuple(sorted({first[gpu] for gpu in wanted})))


def _broadcast(train: Sequence[Facts], infer: Sequence[Facts]) -> Choice | str:
    if not all(side.gpus for side in (*train, *infer)):
        return Choice("broadcast", backend="gloo")
    taken = {gpu for replica in infer for gpu in replica.gpus}
    free = [rank for rank, facts in enumerate(train) if facts.gpus[0] not in taken]
    if not free:
        return (
            "NCCL takes a GPU once in a group, and every training rank shares its GPU with a replica: build with "
            "not_colocate_with="
        )
    if sum(len(replica.gpus) for replica in infer) > len(taken):
        return "NCCL takes a GPU once in a group, and replicas share one: build fewer of them"
    return Choice("broadcast", (free[0],), "nccl")
