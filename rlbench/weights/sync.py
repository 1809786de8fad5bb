"""Weight sync, whoever starts it: choose a transport, move the weights, prove them by log-probs, commit the version.

Staging can be interrupted; weights are applied as a whole, or the replicas are torn. What is to be proven is computed
while replicas apply, where others compute it than who waits.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rlbench.errors import StateError, Stopped, WeightSyncError, WorkerDied
from rlbench.results import Result
from rlbench.units import format_bytes, format_number
from rlbench.weights.facts import LOOPBACK
from rlbench.weights.manifest import Handover, Manifest
from rlbench.weights.probe import Probe
from rlbench.weights.transport import Choice, Facts, asked_for, choose

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}
"""Nats; in half precision seven times and more what the tiny model showed on a CPU (0.029 and 0.0072)."""
APPLYING, PROOF = "weight sync: applying", "weight sync: proof"
Steps = Generator[Any, Any, Any]  # yields what is to be waited for (`.result()`, `.stop()`), and is sent its value
Event = dict[str, Any]  # that changes a session's state


class WeightTarget(Protocol):
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
    apart: bool  # its log-probs are computed by other processes than the one that takes these steps

    @property
    def adapter(self) -> int: ...  # of a policy of adapters, its number in replicas that hold such; else 0
    def facts(self) -> list[Facts]: ...
    def logprobs(self, probe: Probe) -> Steps: ...  # of each sequence
    def stage(self, choice: Choice, adapter: int, handover: Handover) -> Steps: ...  # a `Manifest` of what is there now
    def announce(self, sender: int, options: dict[str, Any]) -> Steps: ...  # gives the `Manifest` of a broadcast
    def broadcast(self, manifest: Manifest, workers: list[int]) -> Steps: ...  # bytes sent; so many workers apply
    def release(self, choice: Choice) -> Steps: ...  # frees what was staged for this sync alone
    def new_version(self, held: Sequence[int]) -> int: ...  # where the replicas hold `held`
    def events(self, version: int, manifest: Manifest) -> list[Event]: ...  # for the record, once it is proven


@dataclass(frozen=True)
class Begun:
    """What is known before anything moves: the replicas' states and places, the transport, the probe."""

    held: list[dict[str, Any]]
    ranks: list[Facts]
    replicas: list[Facts]
    choice: Choice
    probe: Probe
    handover: Handover

    @property
    def provable(self) -> bool:
        """Whether the replicas can compute log-probs, or their KV caches are released."""
        return all(state["kv_cache"] == "cuda" for state in self.held)


@dataclass(frozen=True)
class Synced(Result):
    """What a sync did."""

    version: int | None  # of the replicas; None where a training engine took the weights
    bytes: int
    tensors: int
    transport: str
    gap: float | None  # largest log-prob difference on the probe; None where the proof waits for the KV cache
    allowed: float  # the largest gap that passes
    seconds: float = field(compare=False)  # of staging and the longest applying; where ranks send: of all but the proof
    unchanged: int = 0  # tensors that were left out: frozen, and in the replicas as they are
    unchanged_bytes: int = 0
    spared_bytes: int = 0  # of the tensors that went as differences, what did not travel

    @property
    def whole_bytes(self) -> int:
        """Of all weights, however many of them travelled."""
        return self.bytes + self.unchanged_bytes + self.spared_bytes

    @property
    def bytes_per_s(self) -> float:
        """Of what travelled, from the trainer's ranks into the replicas."""
        return self.bytes / self.seconds

    @property
    def sent(self) -> str:
        """What travelled, how, and how fast."""
        size, rest, tensors = format_bytes(self.bytes), "", f"{format_number(self.tensors)} tensors"
        if self.unchanged or self.spared_bytes > 0:
            size += f" of {format_bytes(self.whole_bytes)}"
        if self.spared_bytes > 0:
            size += " as differences"
        if self.unchanged:
            rest = f" ({format_number(self.unchanged)} unchanged)"
        return f"{size} in {tensors}{rest} by {self.transport} at {format_bytes(self.bytes_per_s)}/s"

    def __repr__(self) -> str:
        gap = "proof waits for the KV cache" if self.gap is None else f"gap {self.gap:.1g} nats"
        version = "" if self.version is None else f"v{self.version} · "
        return f"Synced({version}{self.sent} · {gap})"


def sync_steps(
    source: WeightSource,
    infer: WeightTarget,
    transport: str | None,
    lead: Callable[[Steps], Steps] = lambda steps: steps,
) -> Steps:
    """Bring a trainer's weights to the replicas; return `Synced`. `lead` runs steps on the rank that speaks for all."""
    ranks = None if source.apart else source.facts()  # a collective of those that take these steps
    begun: Begun = yield from lead(_begin(infer, source, ranks, transport))
    choice, adapter = begun.choice, source.adapter if infer.info.get("adapters") else 0
    broadcasts, sent = choice.transport == "broadcast", None
    meanwhile, got, owed = source.apart and not broadcasts, None, None
    expected = () if meanwhile else (yield from source.logprobs(begun.probe))
    begin = time.perf_counter()
    if broadcasts:
        group = _group_options(infer.name, begun) | {"adapter": adapter, "handover": begun.handover}
        manifest = yield from source.announce(choice.senders[0], group)
        yield from lead(_call(infer, "check_weights", replace(manifest, channel=None)))
    else:
        manifest = yield from source.stage(choice, adapter, begun.handover)
    version = yield from lead(_new_version(source, begun))
    manifest, staged = replace(manifest, version=version), time.perf_counter()
    try:
        if meanwhile:
            proof, got, applied, owed = yield from _applied_and_owed(source, infer, begun, manifest)
            seconds = staged - begin + applied
        else:
            proof = _proof(source, begun, version, expected)
            yield from lead(_owe(infer, proof))
            if broadcasts:
                sent = yield from source.broadcast(manifest, [facts.workers for facts in begun.replicas])
            else:
                yield from lead(_call(infer, "apply_weights", manifest, what=APPLYING))
            seconds = time.perf_counter() - begin
    finally:
        yield from source.release(choice)
    gap = yield from lead(_prove(source, infer, begun, proof, manifest, got, owed))
    return synced(version, manifest, choice.transport, gap, source.dtype, seconds, sent)


def synced(
    version: int | None,
    manifest: Manifest,
    transport: str,
    gap: float | None,
    dtype: str,
    seconds: float,
    sent: int | None = None,
) -> Synced:
    """Describe a sync of what the manifest lists, by a trainer that computes in `dtype`; `sent`: bytes that travelled
    of what goes as differences."""
    left_out = list(manifest.left_out)
    size = sent if manifest.delta and sent is not None else manifest.nbytes
    sizes = size, len(list(manifest.entries))
    unchanged = len(left_out), sum(entry.nbytes for entry in left_out)
    spared = manifest.nbytes - size
    return Synced(version, *sizes, transport, gap, allowed_gap(dtype), seconds, *unchanged, spared)


def commit_steps(infer: WeightTarget, proof: dict[str, Any]) -> Steps:
    """Prove what was put on record, commit its version, and return the gap."""
    got = yield from replica_logprobs(infer, Probe.of_rows(proof["tokens"], proof.get("shown", "")), PROOF)
    gap, state = yield from _committed(infer, proof, got)
    infer.link.engine(infer.name, {"state": state, "proof": None})
    return gap


def replica_logprobs(infer: WeightTarget, probe: Probe, what: str) -> Steps:
    """Return what each replica says of the probe."""
    return (yield _logprobs_call(infer, probe, what))


def engine_event(name: str, fields: dict[str, Any]) -> Event:
    """Return the event that sets fields of an engine's record."""
    return {"do": "engine", "name": name, "fields": fields}


def allowed_gap(dtype: str) -> float:
    """Return how far log-probs of two engines that compute in `dtype` may differ, in nats."""
    return TOLERANCE.get(dtype, TOLERANCE["bfloat16"])


def largest_gap(expected: Sequence[Any], replicas: Sequence[Sequence[Any]]) -> float:
    """Return the largest difference between `expected` rows of log-probs and those of any replica; NaN where one is."""
    flat = np.concatenate([np.asarray(row) for row in expected])
    gaps = [np.abs(np.concatenate([np.asarray(row) for row in rows]) - flat).max() for rows in replicas]
    return float(np.max(gaps))  # Python's max would pass over a NaN


def check_proof(proof: dict[str, Any], replicas: Sequence[Sequence[np.ndarray]]) -> float:
    """Return the largest gap between the trainer's and the replicas' log-probs; WeightSyncError above the tolerance."""
    gap, allowed = largest_gap(proof["expected"], replicas), allowed_gap(proof["dtype"])
    if not gap <= allowed:
        raise WeightSyncError(
            f"after the sync the replica's log-probs differ from the trainer's by up to {gap:.2g} (allowed in "
            f"{proof['dtype']}: {allowed:g}). The replica refuses to generate until a sync succeeds: check "
            "postprocess_output_named_parameters and that both engines hold the same architecture (a class of your own "
            "in vLLM takes tensors by its parameters' weight_loader), then sync again"
        )
    return gap


def asked(engine: Any, what: str) -> list[Any]:
    """Return one answer per worker; WeightSyncError where one is dead."""
    with living():
        return list(engine.control(what))


@contextlib.contextmanager
def living() -> Iterator[None]:
    """Have a worker that is dead raise WeightSyncError; nothing has moved yet."""
    try:
        yield
    except WorkerDied as error:
        raise WeightSyncError(f"the weights cannot be synced: {error}") from error


def _group_options(to: str, begun: Begun) -> dict[str, Any]:
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


def _begin(infer: WeightTarget, source: WeightSource, ranks: list[Facts] | None, transport: str | None) -> Steps:
    """Refuse what cannot succeed and choose the transport; changes nothing. A replica answers once it is free; ranks of
    which nothing is known yet are asked meanwhile."""
    dtype = source.dtype
    if dtype != infer.info["dtype"]:
        raise StateError(
            f"the trainer computes in {dtype} and the replica in {infer.info['dtype']}, so their log-probs cannot be "
            f"compared: build the InferenceEngine with dtype={dtype!r}"
        )
    delta = bool(infer.info.get("delta"))
    transport = asked_for(transport, delta)
    with living():
        asking = infer.call_all("begin_sync", what="weight sync")
        ranks = source.facts() if ranks is None else ranks
        answers = yield asking
    held, replicas = [state for state, _ in answers], [facts for _, facts in answers]
    choice = choose(ranks, replicas, transport)
    tokens = {str(state["holds"]) for state in held}
    handover = Handover(infer.name, tokens.pop() if len(tokens) == 1 else "", secrets.token_hex(8), delta)
    return Begun(held, ranks, replicas, choice, Probe.of(infer.info), handover)


def _call(infer: WeightTarget, name: str, manifest: Manifest, what: str = "weight sync") -> Steps:
    yield infer.call_all(name, manifest, what=what)


def _new_version(source: WeightSource, begun: Begun) -> Steps:
    yield from ()
    return source.new_version([int(state["version"]) for state in begun.held])


def _applied_and_owed(source: WeightSource, infer: WeightTarget, begun: Begun, manifest: Manifest) -> Steps:
    """Have the replicas apply, and compute the proof right behind it where they can, and the source meanwhile what they
    will have to prove. Return that, what they said (None: it waits for their KV cache), the seconds that applying took,
    and what waits until the proof is on record. Where the source fails, they hold weights that a sync must prove."""
    applying = infer.call_all("apply_weights", manifest, what=APPLYING)
    proving = _logprobs_call(infer, begun.probe, PROOF) if begun.provable else None
    try:
        try:
            expected = yield from source.logprobs(begun.probe)
        except (Exception, Stopped):
            yield applying
            raise
        proof = _proof(source, begun, manifest.version, expected)
        owed = infer.link.applying(engine_event(infer.name, {"proof": proof}))
        seconds = max((yield applying))
    except (Exception, Stopped):
        if proving is not None:
            with contextlib.suppress(Exception, Stopped):  # of weights that nobody asks for any more
                yield proving
        raise
    got = None if proving is None else (yield proving)
    return proof, got, seconds, owed


def _logprobs_call(infer: WeightTarget, probe: Probe, what: str) -> Any:
    return infer.call_all("prompt_logprobs", probe.tokens, *([probe.media] if probe.media else []), what=what)


def _proof(source: WeightSource, begun: Begun, version: int, expected: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return what the replicas will have to prove, as it goes on record."""
    rows = [row.tolist() for row in expected]
    proof = {"version": version, "tokens": begun.probe.tokens, "expected": rows, "dtype": source.dtype}
    return proof | ({"shown": begun.probe.kind} if begun.probe.media else {})


def _owe(infer: WeightTarget, proof: dict[str, Any]) -> Steps:
    """Put the proof on record: a driver that dies from now on leaves it behind."""
    yield from ()
    infer.link.engine(infer.name, {"proof": proof})


def _prove(
    source: WeightSource,
    infer: WeightTarget,
    begun: Begun,
    proof: dict[str, Any],
    manifest: Manifest,
    got: Sequence[Sequence[np.ndarray]] | None,
    owed: Callable[[], Any] | None,
) -> Steps:
    """Compare log-probs, which replicas are asked for where they have not `got` them, and commit the version; where a
    KV cache is released that waits for it. Return the gap. `owed` waits until the proof is on record."""
    gap = None
    if begun.provable:
        got = (yield from replica_logprobs(infer, begun.probe, PROOF)) if got is None else got
        gap, state = yield from _committed(infer, proof, got)
        fields = {"state": state, "proof": None}
    else:
        fields = {"state": infer.status(), "proof": proof}
    if owed is not None:
        owed()  # before what takes it off again
    infer.link.apply(engine_event(infer.name, fields), *source.events(int(proof["version"]), manifest))
    return gap


def _committed(infer: WeightTarget, proof: dict[str, Any], got: Sequence[Sequence[np.ndarray]]) -> Steps:
    """Check a proof and commit its version; return the gap, and the replicas' status then."""
    gap = check_proof(proof, got)
    states = yield infer.call_all("commit_version", proof["version"], what="weight sync")
    return gap, states[0]
