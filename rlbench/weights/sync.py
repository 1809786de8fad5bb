"""Weight sync, whoever starts it: choose a transport, move the weights, prove them by log-probs, commit the version.

    begin    replicas ready, transport chosen       nothing has changed
    probe    the trainer's log-probs on the probe
    stage    (or announce) the weights              can be interrupted
    apply    (or broadcast) them                    as a whole, or the replicas are torn
    prove    the replicas' log-probs on the probe   waits where the KV cache is released
    commit   the version

A kernel and the ranks themselves run the same steps: `WeightSource` is the trainer's end, `Replicas` the other, and
`lead` says how the replicas are asked (at once; or by rank 0 for all ranks).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlbench.errors import StateError, Stopped, WeightSyncError, WorkerDied
from rlbench.results import Result
from rlbench.units import format_bytes
from rlbench.weights.manifest import Manifest
from rlbench.weights.proof import allowed_gap, check_proof, probe_tokens
from rlbench.weights.transport import Choice, Facts, choose

LOOPBACK = "127.0.0.1"
Steps = Generator[Any, Any, Any]
"""Yields what is to be waited for (`.result()`, `.stop()`), and is sent its value."""


class Replicas(Protocol):
    """What a sync asks of an inference engine; `call_all` returns what is waited for."""

    name: str

    @property
    def info(self) -> dict[str, Any]: ...

    @property
    def link(self) -> Any: ...

    def control(self, name: str, *args: Any) -> list[Any]: ...

    def status(self) -> dict[str, Any]: ...

    def call_all(self, name: str, *args: Any, **options: Any) -> Any: ...


class WeightSource(Protocol):
    """The trainer's end of a sync: training ranks as their kernel calls them, or one rank among its peers."""

    dtype: str

    def facts(self) -> list[Facts]:
        """Say where each rank is."""

    def logprobs(self, tokens: list[list[int]]) -> Steps:
        """Return a row of log-probs for each sequence."""

    def stage(self, choice: Choice) -> Steps:
        """Put all weights where the replicas can read them; return the `Manifest`."""

    def announce(self, sender: int, options: dict[str, Any]) -> Steps:
        """Say what will be broadcast and where the group meets; return the `Manifest`."""

    def broadcast(self, manifest: Manifest, workers: list[int]) -> Steps:
        """Send all weights while the replicas, of so many workers each, apply them."""

    def release(self, choice: Choice) -> Steps:
        """Free what was staged for this sync alone."""

    def new_version(self, held: Sequence[int]) -> int:
        """Choose the version of the weights, where the replicas hold `held`."""

    def committed(self, version: int, manifest: Manifest) -> None:
        """Note what the replicas have now."""


@dataclass(frozen=True)
class Begun:
    """What is known before anything moves: the replicas' states and places, the transport, the probe's tokens."""

    held: list[dict[str, Any]]
    ranks: list[Facts]
    replicas: list[Facts]
    choice: Choice
    probe: list[list[int]]


@dataclass(frozen=True)
class Synced(Result):
    """What a sync did. `gap`: largest log-prob difference on the probe; None where the proof waits for the KV cache.
    `allowed`: the largest that passes. `version`: of the replicas; None where a training engine took the weights."""

    version: int | None
    bytes: int
    tensors: int
    transport: str
    gap: float | None
    allowed: float

    def __repr__(self) -> str:
        gap = "proof waits for the KV cache" if self.gap is None else f"gap {self.gap:.1g} nats"
        sent = f"{format_bytes(self.bytes)} in {self.tensors} tensors by {self.transport}"
        version = "" if self.version is None else f"v{self.version} · "
        return f"Synced({version}{sent} · {gap})"


def sync_steps(
    source: WeightSource, infer: Replicas, transport: str | None, lead: Callable[[Steps], Steps] = lambda steps: steps
) -> Steps:
    """Bring a trainer's weights to the replicas; return `Synced`.

    Args:
        source, infer: both ends.
        transport: "shm", "ipc", "broadcast", or None for the best that works (`rlbench.weights.transport.choose`).
        lead: runs steps that ask the replicas; on ranks, on the one that speaks for all.
    """
    begun: Begun = yield from lead(_begin(infer, source.dtype, source.facts(), transport))
    expected = yield from source.logprobs(begun.probe)
    choice = begun.choice
    broadcasts = choice.transport == "broadcast"
    manifest: Manifest
    if broadcasts:
        manifest = yield from source.announce(choice.senders[0], group_options(infer.name, begun))
        yield from lead(_call(infer, "check_weights", replace(manifest, channel=None)))
    else:
        manifest = yield from source.stage(choice)
    proof = yield from lead(_owe(source, infer, begun, expected))
    try:
        if broadcasts:
            yield from source.broadcast(manifest, [facts.workers for facts in begun.replicas])
        else:
            yield from lead(_call(infer, "apply_weights", manifest, what="weight sync: applying"))
    finally:
        yield from source.release(choice)
    gap = yield from lead(_prove(source, infer, begun, proof, manifest))
    return synced(proof["version"], manifest, choice.transport, gap, source.dtype)


def synced(version: int | None, manifest: Manifest, transport: str, gap: float | None, dtype: str) -> Synced:
    """Describe a sync of what the manifest lists, by a trainer that computes in `dtype`."""
    return Synced(version, manifest.nbytes, len(list(manifest.entries)), transport, gap, allowed_gap(dtype))


def commit_steps(infer: Replicas, proof: dict[str, Any]) -> Steps:
    """Prove what was put on record, commit its version, and return the gap."""
    got = yield infer.call_all("prompt_logprobs", proof["tokens"], what="weight sync: proof")
    gap = check_proof(proof, got)
    yield infer.call_all("commit_version", proof["version"], what="weight sync")
    infer.link.engine(infer.name, {"state": infer.status(), "proof": None})
    return gap


def asked(engine: Any, what: str) -> list[Any]:
    """Return one answer per worker; WeightSyncError where one is dead."""
    try:
        return list(engine.control(what))
    except WorkerDied as error:
        raise WeightSyncError(f"the weights cannot be synced: {error}") from error


def group_options(to: str, begun: Begun) -> dict[str, Any]:
    """Say who sends a broadcast to engine `to`, where its group meets, and which one all replicas are in already."""
    sender = begun.choice.senders[0]
    one_node = all(facts.node == begun.ranks[sender].node for facts in begun.replicas)
    tokens = {dict(facts.channels).get("", "") for facts in begun.replicas}
    return {
        "to": to,
        "sender": sender,
        "host": LOOPBACK if one_node else begun.ranks[sender].address,
        "world_size": 1 + sum(facts.workers for facts in begun.replicas),
        "backend": begun.choice.backend,
        "held": tokens.pop() if len(tokens) == 1 else "",
    }


def per_replica(manifest: Manifest, workers: Iterable[int]) -> list[Manifest]:
    """Return the manifest of a broadcast as each replica reads it: its workers have ranks of their own in the group."""
    assert manifest.channel is not None
    found, first = [], 1
    for count in workers:
        found.append(replace(manifest, channel=replace(manifest.channel, first_rank=first)))
        first += count
    return found


def send_while_applying(
    send: Callable[[], Any], applying: Sequence[Any], give_up: Callable[[str], None], to: str
) -> BaseException | None:
    """Run `send` while the replicas apply; each side waits for the other inside its call.

    Whichever fails first, the others are told to give up. The death of one replica must be seen while the others still
    wait, so `applying` holds a call for each.

    Returns:
        The error to show: what went wrong first hand, not what others gave up for. None where nothing did.
    """

    first = threading.Lock()

    def released(error: BaseException | None) -> None:
        if error is not None and first.acquire(blocking=False):  # an echo might reach the group of the next sync
            give_up(str(error))

    with ThreadPoolExecutor(max(1, len(applying)), thread_name_prefix="rlbench weight sync") as pool:
        futures = [pool.submit(call.result) for call in applying]
        for future in futures:
            future.add_done_callback(lambda ended: released(ended.exception()))
        ended: list[BaseException | None] = []
        try:
            send()
        except (Exception, Stopped) as error:  # a hook of the user's too
            released(error)
            ended.append(error)
        ended += [future.exception() for future in futures]
    errors = [error for error in ended if error is not None]
    if not errors:
        return None
    cause = next((error for error in errors if not getattr(error, "secondary", False)), errors[0])
    if isinstance(cause, Stopped):
        return cause
    shown = WeightSyncError(
        f"the weights did not reach all replicas: {cause}\n  A replica that had begun to take them refuses to "
        f"generate until a sync succeeds: sync again (a dead worker's engine must be built again first), or call "
        f"{to}.reload()"
    )
    shown.__cause__ = cause
    return shown


def _begin(infer: Replicas, dtype: str, ranks: list[Facts], transport: str | None) -> Steps:
    """Refuse what cannot succeed and choose the transport; changes nothing."""
    held = asked(infer, "status")
    if dtype != infer.info["dtype"]:
        raise StateError(
            f"the trainer computes in {dtype} and the replica in {infer.info['dtype']}, so their log-probs cannot be "
            f"compared: build the InferenceEngine with dtype={dtype!r}"
        )
    if any(state["weights"] in ("meta", "cpu") for state in held):
        raise StateError(f"the weights of engine {infer.name!r} are not resident: cuda('weights') on it first")
    replicas: list[Facts] = asked(infer, "sync_facts")
    choice = choose(ranks, replicas, transport)
    yield infer.call_all("begin_sync", what="weight sync")
    return Begun(held, ranks, replicas, choice, probe_tokens(int(infer.info["vocab_size"])))


def _call(infer: Replicas, name: str, manifest: Manifest, what: str = "weight sync") -> Steps:
    yield infer.call_all(name, manifest, what=what)


def _owe(source: WeightSource, infer: Replicas, begun: Begun, expected: Sequence[np.ndarray]) -> Steps:
    """Put on record what the replicas will have to prove: a driver that dies from now on leaves it behind."""
    yield from ()
    version = source.new_version([int(state["version"]) for state in begun.held])
    rows = [row.tolist() for row in expected]
    proof = {"version": version, "tokens": begun.probe, "expected": rows, "dtype": source.dtype}
    infer.link.engine(infer.name, {"proof": proof})
    return proof


def _prove(source: WeightSource, infer: Replicas, begun: Begun, proof: dict[str, Any], manifest: Manifest) -> Steps:
    """Compare log-probs and commit the version; where a KV cache is released that waits for it. Return the gap."""
    gap = None
    if all(state["kv_cache"] == "cuda" for state in begun.held):
        gap = yield from commit_steps(infer, proof)
    else:
        infer.link.engine(infer.name, {"state": infer.status(), "proof": proof})
    source.committed(int(proof["version"]), manifest)
    return gap
