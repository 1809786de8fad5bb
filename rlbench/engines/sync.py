"""Weight sync: choose a transport, bring the weights over it, prove it by log-probs, then commit the version.

Staging (shared memory, CUDA IPC) can be interrupted, and so can a broadcast until it starts; applying happens as a
whole. The version is committed only after the replicas gave the trainer's log-probs on the same tokens: checksums
cannot see packed parameters. Where a replica's KV cache is released, the proof waits until it is back
(`infer.cuda("kv_cache")`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import Ragged, TrainBatch
from rlbench.dispatch import views
from rlbench.dispatch.chain import Chain, Steps
from rlbench.dispatch.link import shm_prefix
from rlbench.engines.base import Engine
from rlbench.engines.crossing import Crossing
from rlbench.errors import BuildError, StateError, WeightSyncError, WorkerDied
from rlbench.results import Result
from rlbench.units import format_bytes
from rlbench.weights.manifest import Manifest, merged
from rlbench.weights.transport import Choice, Facts, choose

if TYPE_CHECKING:
    from rlbench.engines.inference import InferenceEngine
    from rlbench.engines.train import TrainEngine

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}
PROBE_ROWS, PROBE_TOKENS = 2, 24
PROBE_OPTIONS = {"packing": False, "head": "plain"}
"""What every causal model can compute; whether it can run packed is another question."""
LOOPBACK = "127.0.0.1"


def sync_weights(
    train: TrainEngine, infer: InferenceEngine, version: int | None = None, transport: str | None = None
) -> Chain:
    """Start a sync. `version` is what the replicas then hold (default: one more than they hold).

    `transport`: "shm", "ipc", "broadcast", or None for the best that works (`rlbench.weights.transport.choose`).

    The result: `Synced`; its `gap` is None where the KV cache is released, so that the proof follows with
    `infer.cuda("kv_cache")`.
    """
    return Chain("weight sync", train.link.held("weight sync", _steps(train, infer, version, transport)))


def agreement_steps(train: TrainEngine, infer: InferenceEngine) -> Steps:
    """Refuse, as soon as both engines are built, a model whose weights could never be synced between them.

    Compares names and shapes of what would be sent, and both sides' log-probs on the probe. Where the two were asked to
    compute in different dtypes there is nothing to compare, and a sync says so.

    Raises:
        BuildError: with what differs.
    """
    dtype = str(train.info["dtype"])
    if dtype != infer.info["dtype"]:
        return
    tokens = probe_tokens(int(infer.info["vocab_size"]))
    try:
        layout = yield train.call_all("weight_layout", finish=lambda found: found[0], what="comparing names")
        yield infer.call_all("check_weights", layout, what="comparing names")
        computed = yield train.call_all(
            "policy_forward", probe_batch(tokens), PROBE_OPTIONS, finish=rows_in_order, what="comparing log-probs"
        )
        got = yield infer.call_all("prompt_logprobs", tokens, what="comparing log-probs")
    except WeightSyncError as error:
        raise BuildError(
            f"the weights of {train.info['architecture']} cannot be brought from the trainer to the replica: {error}"
        ) from error
    gap, allowed = largest_gap(computed["logprobs"], got), allowed_gap(dtype)
    if not gap <= allowed:
        raise BuildError(
            f"{infer.executor} and transformers compute different log-probs from the same checkpoint of "
            f"{train.info['architecture']}: up to {gap:.2g} (allowed in {dtype}: {allowed:g}), so what is rolled out "
            "would not be the trained policy's. docs/models.md lists families that agree"
        )


@dataclass(frozen=True)
class Begun:
    """What is known before anything moves: the replicas' states and places, the transport, the probe's tokens."""

    held: list[dict[str, Any]]
    replicas: list[Facts]
    choice: Choice
    probe: list[list[int]]


def begin_steps(infer: InferenceEngine, dtype: str, ranks: Sequence[Facts], transport: str | None) -> Steps:
    """Refuse what cannot succeed and choose the transport; changes nothing. Returns a `Begun`.

    Args:
        infer: the replicas.
        dtype: the trainer computes in.
        ranks: where the training ranks are.
        transport: asked for by name; None: the best that works.
    """
    held = asked(infer, "status")
    _need_replicas_ready(infer, dtype, held)
    replicas: list[Facts] = asked(infer, "sync_facts")
    choice = choose(ranks, replicas, transport)
    yield infer.call_all("begin_sync", what="weight sync")
    return Begun(held, replicas, choice, probe_tokens(int(infer.info["vocab_size"])))


def record_proof(
    infer: InferenceEngine, begun: Begun, version: int, expected: Sequence[np.ndarray], dtype: str
) -> dict[str, Any]:
    """Put on record what the replicas will have to prove: a driver that dies from now on leaves it behind.

    `expected`: the trainer's log-probs on the probe, in `dtype`. Returns the proof, for `prove_steps`.
    """
    rows = [row.tolist() for row in expected]
    proof = {"version": version, "tokens": begun.probe, "expected": rows, "dtype": dtype}
    infer.link.engine(infer.name, {"proof": proof})
    return proof


def prove_steps(infer: InferenceEngine, begun: Begun, proof: dict[str, Any]) -> Steps:
    """Compare log-probs and commit the version; where the KV cache is released that waits for it. Returns the gap."""
    gap = None
    if all(s["kv_cache"] == "cuda" for s in begun.held):
        got = yield infer.call_all("prompt_logprobs", begun.probe, what="weight sync: proof")
        gap = check_proof(proof, got)
        yield infer.call_all("commit_version", proof["version"], what="weight sync")
    infer.link.engine(infer.name, {"state": infer.status(), "proof": proof if gap is None else None})
    return gap


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

    @classmethod
    def of(cls, manifest: Manifest, version: int, transport: str, gap: float | None, dtype: str) -> Synced:
        """What was sent is in the manifest; `dtype` is what the trainer computes in."""
        tensors = len(list(manifest.entries))
        return cls(version, manifest.nbytes, tensors, transport, gap, allowed_gap(dtype))

    def __repr__(self) -> str:
        gap = "proof waits for the KV cache" if self.gap is None else f"gap {self.gap:.1g} nats"
        sent = f"{format_bytes(self.bytes)} in {self.tensors} tensors by {self.transport}"
        version = "" if self.version is None else f"v{self.version} · "
        return f"Synced({version}{sent} · {gap})"


def _steps(train: TrainEngine, infer: InferenceEngine, version: int | None, transport: str | None) -> Steps:
    view = views.make("sync")
    need_weights(train)
    dtype = str(train.info["dtype"])
    ranks: list[Facts] = asked(train, "sync_facts")
    begun: Begun = yield from begin_steps(infer, dtype, ranks, transport)
    choice = begun.choice
    expected = yield train.call_all(
        "policy_forward", probe_batch(begun.probe), PROBE_OPTIONS, finish=rows_in_order, what="weight sync"
    )
    manifest: Manifest
    if choice.transport == "broadcast":
        manifest = yield from _announced(train, infer, choice, ranks, begun.replicas)
    else:
        options = {
            "transport": choice.transport,
            "prefix": f"{shm_prefix(train.link.name)}{train.name}",
            "ranks": choice.senders,
        }
        manifest = yield train.call_all(
            "stage_weights",
            options,
            finish=lambda found: merged([m for m in found if m is not None]),
            what="weight sync: staging",
            observer=view,
        )
    if version is None:
        version = max(int(s["version"]) for s in begun.held) + 1
    proof = record_proof(infer, begun, version, expected["logprobs"], dtype)
    if choice.transport == "broadcast":
        yield Crossing(train, infer, manifest, [facts.workers for facts in begun.replicas])
    else:
        yield infer.call_all("apply_weights", manifest, what="weight sync: applying")
    if choice.transport == "ipc":
        yield train.call_all("release_weights", what="weight sync")
    gap = yield from prove_steps(infer, begun, proof)
    if choice.transport == "shm":  # these files outlive the ranks: what a rebuilt trainer may go on from
        train.note_staged(version, asdict(manifest))
    done = Synced.of(manifest, version, choice.transport, gap, dtype)
    if view is not None:
        view.close(done)
    return done


def need_weights(train: TrainEngine) -> None:
    """Refuse to read a trainer's weights where they are not whole, or not resident; StateError names the mend."""
    status = train.status()
    if status["torn"] is not None:
        raise StateError(status["torn"])
    if status["weights"] != "cuda":
        raise StateError(f"the weights of {train.name} are offloaded: {train.name}.cuda('weights') first")


def asked(engine: Engine, what: str) -> list[Any]:
    """One answer per worker; WeightSyncError where one is dead."""
    try:
        return engine.control(what)
    except WorkerDied as error:
        raise WeightSyncError(f"the weights cannot be synced: {error}") from error


def _announced(
    train: TrainEngine, infer: InferenceEngine, choice: Choice, ranks: list[Facts], replicas: list[Facts]
) -> Steps:
    """What will be broadcast and where the group meets, accepted by all replicas before anything is sent."""
    options, sender = group_options(infer.name, choice, ranks, replicas), choice.senders[0]
    manifest = yield train.call_all(
        "announce_weights", options, finish=lambda found: found[sender], what="weight sync: announcing"
    )
    yield infer.call_all("check_weights", replace(manifest, channel=None), what="weight sync")
    return manifest


def group_options(to: str, choice: Choice, ranks: Sequence[Facts], replicas: Sequence[Facts]) -> dict[str, Any]:
    """Who sends a broadcast to engine `to`, where its group meets, and which one all replicas are in already."""
    sender = choice.senders[0]
    one_node = all(facts.node == ranks[sender].node for facts in replicas)
    tokens = {dict(facts.channels).get("", "") for facts in replicas}
    return {
        "to": to,
        "sender": sender,
        "host": LOOPBACK if one_node else ranks[sender].address,
        "world_size": 1 + sum(facts.workers for facts in replicas),
        "backend": choice.backend,
        "held": tokens.pop() if len(tokens) == 1 else "",
    }


def probe_tokens(vocab_size: int) -> list[list[int]]:
    """Fixed pseudo-random token ids: unlikely text, on which a wrong weight shows at once."""
    rng = np.random.default_rng(20261121)
    return rng.integers(0, vocab_size, (PROBE_ROWS, PROBE_TOKENS)).tolist()  # type: ignore[no-any-return]


def probe_batch(tokens: list[list[int]]) -> TrainBatch:
    """Sequences as a batch whose responses are all tokens after the first."""
    responses = Ragged.from_rows([row[1:] for row in tokens], np.int32)
    zeros = np.zeros(len(responses.values), np.float32)
    rows = len(tokens)
    return TrainBatch(
        prompts=Ragged.from_rows([row[:1] for row in tokens], np.int32),
        responses=responses,
        mask=np.ones(len(zeros), bool),
        advantages=zeros,
        sampler_logprobs=zeros,
        group=np.zeros(rows, np.int32),
        weight_version=np.zeros(rows, np.int64),
    )


def rows_in_order(parts: list[dict[str, Any]]) -> dict[str, list[np.ndarray]]:
    """Join the ranks' per-row `channels` in the batch's order, each row once; by name."""
    parts = [part for part in parts if len(part["rows"])]
    rows = np.concatenate([part["rows"] for part in parts]).astype(np.int64)
    _, first = np.unique(rows, return_index=True)  # a row that was repeated to fill a rank counts once
    shared = [name for name in parts[0]["channels"] if all(name in part["channels"] for part in parts)]
    joined = {name: [values for part in parts for values in part["channels"][name]] for name in shared}
    return {name: [np.asarray(values[i]) for i in first] for name, values in joined.items()}


def allowed_gap(dtype: str) -> float:
    """How far log-probs of two engines that compute in `dtype` may differ."""
    return TOLERANCE.get(dtype, TOLERANCE["bfloat16"])


def largest_gap(expected: Sequence[Any], replicas: Sequence[Sequence[Any]]) -> float:
    """Largest difference between `expected` rows of log-probs and those of any replica."""
    flat = np.concatenate([np.asarray(row) for row in expected])
    return max(float(np.abs(np.concatenate([np.asarray(row) for row in rows]) - flat).max()) for rows in replicas)


def check_proof(proof: dict[str, Any], replicas: list[list[np.ndarray]]) -> float:
    """Largest difference between the trainer's and the replicas' log-probs; WeightSyncError above the tolerance."""
    gap, allowed = largest_gap(proof["expected"], replicas), allowed_gap(proof["dtype"])
    if not gap <= allowed:
        raise WeightSyncError(
            f"after the sync the replica's log-probs differ from the trainer's by up to {gap:.2g} (allowed in "
            f"{proof['dtype']}: {allowed:g}). The replica refuses to generate until a sync succeeds: check "
            "postprocess_output_named_parameters and that both engines hold the same architecture, then sync again"
        )
    return gap


def _need_replicas_ready(infer: InferenceEngine, trains: str, held: list[dict[str, Any]]) -> None:
    holds = infer.info["dtype"]
    if trains != holds:
        raise StateError(
            f"the trainer computes in {trains} and the replica in {holds}, so their log-probs cannot be compared: "
            f"build the InferenceEngine with dtype={trains!r}"
        )
    if any(s["weights"] in ("meta", "cpu") for s in held):
        raise StateError(f"the weights of engine {infer.name!r} are not resident: cuda('weights') on it first")
