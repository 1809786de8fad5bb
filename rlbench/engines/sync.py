"""Weight sync: stage on the trainer, apply on every replica, prove it by log-probs, then commit the version.

Staging can be interrupted; applying happens as a whole. The version is committed only after the replicas gave the
trainer's log-probs on the same tokens: checksums cannot see packed parameters. Where a replica's KV cache is
released, the proof waits until it is back (`infer.cuda("kv_cache")`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import Ragged, TrainBatch
from rlbench.dispatch.chain import Chain, Steps
from rlbench.dispatch.link import shm_prefix
from rlbench.errors import StateError, WeightSyncError

if TYPE_CHECKING:
    from rlbench.engines.inference import InferenceEngine
    from rlbench.engines.train import TrainEngine

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}
TRANSPORTS = ("shm", "ipc")
PROBE_ROWS, PROBE_TOKENS = 2, 24


def sync_weights(
    train: TrainEngine, infer: InferenceEngine, version: int | None = None, transport: str = "shm"
) -> Chain:
    """Start a sync. `version` is what the replicas then hold (default: one more than they hold).

    The result: `version`, `bytes`, `tensors`, `gap` (largest log-prob difference on the probe; None where the KV cache
    is released, so that the proof follows with `infer.cuda("kv_cache")`).
    """
    if transport not in TRANSPORTS:
        raise WeightSyncError(f"transport={transport!r}: there are {', '.join(TRANSPORTS)}")
    return Chain("weight sync", _steps(train, infer, version, transport))


def _steps(train: TrainEngine, infer: InferenceEngine, version: int | None, transport: str) -> Steps:
    held = infer.control("status")
    _need_ready(train, infer, held)
    yield infer.call_all("begin_sync", what="weight sync")
    probe = probe_tokens(int(infer.info["vocab_size"]))
    expected = yield train.call_all(
        "policy_forward", probe_batch(probe), {}, finish=rows_in_order, what="weight sync"
    )
    prefix = f"{shm_prefix(train.link.name)}{train.name}"
    manifest = yield train.call_all(
        "stage_weights", {"transport": transport, "prefix": prefix},
        finish=lambda values: values[0], what="weight sync: staging",
    )  # fmt: skip
    proof: dict[str, Any] = {
        "version": max(int(s["version"]) for s in held) + 1 if version is None else version,
        "tokens": probe,
        "expected": [row.tolist() for row in expected["logprobs"]],
        "dtype": str(train.info["dtype"]),
    }
    # on record before anything is applied: a kernel that dies now leaves what the replica still has to prove
    infer.link.engine(infer.name, {"proof": proof})
    yield infer.call_all("apply_weights", manifest, what="weight sync: applying")
    gap = None
    if all(s["kv_cache"] == "cuda" for s in held):
        got = yield infer.call_all("prompt_logprobs", probe, what="weight sync: proof")
        gap = check_proof(proof, got)
        yield infer.call_all("commit_version", proof["version"], what="weight sync")
        proof_left = None
    else:
        proof_left = proof
    infer.link.engine(infer.name, {"state": infer.status(), "proof": proof_left})
    return {
        "version": proof["version"],
        "bytes": manifest.nbytes,
        "tensors": len(list(manifest.entries)),
        "gap": gap,
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
        prompts=Ragged.from_rows([row[:1] for row in tokens], np.int32), responses=responses,
        mask=np.ones(len(zeros), bool), advantages=zeros, sampler_logprobs=zeros,
        group=np.zeros(rows, np.int32), weight_version=np.zeros(rows, np.int64),
    )  # fmt: skip


def rows_in_order(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the ranks' per-row arrays (`rows`, `logprobs`, `entropy`) in the batch's order; each row once."""
    by_row: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for part in parts:
        for row, logprobs, entropy in zip(part["rows"], part["logprobs"], part["entropy"], strict=True):
            by_row[int(row)] = (np.asarray(logprobs), np.asarray(entropy))
    order = sorted(by_row)
    return {"logprobs": [by_row[r][0] for r in order], "entropy": [by_row[r][1] for r in order]}


def check_proof(proof: dict[str, Any], replicas: list[list[np.ndarray]]) -> float:
    """Largest difference between the trainer's and the replicas' log-probs; WeightSyncError above the tolerance."""
    expected = np.concatenate([np.asarray(row) for row in proof["expected"]])
    gap = max(
        float(np.abs(np.concatenate([np.asarray(r) for r in rows]) - expected).max()) for rows in replicas
    )
    allowed = TOLERANCE.get(proof["dtype"], TOLERANCE["bfloat16"])
    if not gap <= allowed:
        raise WeightSyncError(
            f"after the sync the replica's log-probs differ from the trainer's by up to {gap:.2g} (allowed in "
            f"{proof['dtype']}: {allowed:g}). The replica refuses to generate until a sync succeeds: check "
            "postprocess_output_named_parameters and that both engines hold the same architecture, then sync again"
        )
    return gap


def _need_ready(train: TrainEngine, infer: InferenceEngine, held: list[dict[str, Any]]) -> None:
    if train.status()["weights"] != "cuda":
        raise StateError(f"the trainer's weights are offloaded: {train.name}.cuda('weights') first")
    trains, holds = train.info["dtype"], infer.info["dtype"]
    if trains != holds:
        raise StateError(
            f"the trainer computes in {trains} and the replica in {holds}, so their log-probs cannot be compared: "
            f"build the InferenceEngine with dtype={trains!r}"
        )
    if any(s["weights"] in ("meta", "cpu") for s in held):
        raise StateError(f"the replica's weights are not resident: {infer.name}.cuda('weights') first")
