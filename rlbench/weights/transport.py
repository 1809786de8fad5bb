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
    """Where one training rank, or one replica, is."""

    node: str  # what processes have in common that see one shared memory
    address: str  # by which other nodes reach this one
    gpus: tuple[str, ...] = ()  # uuid of the GPU of each of its worker processes
    workers: int = 1  # processes that take part in a sync (a tensor parallel replica has several)
    channels: tuple[tuple[str, str], ...] = ()  # broadcast groups: token by the other side's name (of a replica: "")


@dataclass(frozen=True)
class Choice:
    """How weights travel."""

    transport: str
    senders: tuple[int, ...] = (0,)  # the training ranks that write or send
    backend: str = ""  # of a broadcast's group


def asked_for(transport: str | None, delta: bool) -> str | None:
    """Return the transport to ask for, where replicas take weights as differences (`delta`) by the one that copies them
    between nodes, and another was perhaps asked for; None: the best."""
    if delta and transport not in (None, "broadcast"):
        raise WeightSyncError(
            f"transport={transport!r} has nothing to gain from delta=True, by which these replicas were built: memory "
            'that both sides share holds all weights anyway. Leave transport out, or take "broadcast"; or build the '
            "replicas without delta="
        )
    return "broadcast" if delta else transport


def choose(train: Sequence[Facts], infer: Sequence[Facts], asked: str | None = None) -> Choice:
    """Choose the transport between training ranks and replicas, or check the one that was asked for.

    One node without GPUs: `shm`. Every replica worker's GPU also holds a training rank: `ipc`. Else `broadcast`, or
    `shm` on one node where every training rank's GPU is a replica's too, as NCCL takes a GPU once.
    """
    if asked is not None and asked not in TRANSPORTS:
        raise WeightSyncError(
            f"transport={asked!r}{nearest(asked, TRANSPORTS)}; there are {', '.join(TRANSPORTS)}, and None chooses"
        )
    outcomes = {"shm": Choice("shm"), "ipc": _ipc(train, infer), "broadcast": _broadcast(train, infer)}
    if any(replica.node != train[0].node for replica in infer):
        outcomes["shm"] = 'trainer and replicas share no memory, they are on several nodes: use transport="broadcast"'
    on_gpus = all(side.gpus for side in (*train, *infer))  # then not through host memory, else not through sockets
    order = ("ipc", "broadcast", "shm") if on_gpus else ("shm", "broadcast")
    works = [choice for name in order if isinstance(choice := outcomes[name], Choice)]
    if asked is None:
        if works:
            return works[0]
        reasons = "; ".join(f"{name}: {reason}" for name, reason in outcomes.items())
        raise WeightSyncError(f"no transport reaches these replicas from this trainer: {reasons}")
    if isinstance(chosen := outcomes[asked], Choice):
        return chosen
    instead = f", or leave transport out to take {works[0].transport!r}" if works else ""
    raise WeightSyncError(f"transport={asked!r} cannot work here: {chosen}{instead}")


def _ipc(train: Sequence[Facts], infer: Sequence[Facts]) -> Choice | str:
    """Find an exporting rank for each GPU that a replica worker computes on: a handle is good on its own GPU alone."""
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
