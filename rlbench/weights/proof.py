"""The proof of a weight sync: both sides' log-probs on the same tokens. Checksums cannot see packed parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlbench.errors import WeightSyncError

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}
PROBE_ROWS, PROBE_TOKENS = 2, 24


def probe_tokens(vocab_size: int) -> list[list[int]]:
    """Return fixed pseudo-random token ids: unlikely text, on which a wrong weight shows at once."""
    rng = np.random.default_rng(20261121)
    return rng.integers(0, vocab_size, (PROBE_ROWS, PROBE_TOKENS)).tolist()  # type: ignore[no-any-return]


def allowed_gap(dtype: str) -> float:
    """Return how far log-probs of two engines that compute in `dtype` may differ, in nats."""
    return TOLERANCE.get(dtype, TOLERANCE["bfloat16"])


def largest_gap(expected: Sequence[Any], replicas: Sequence[Sequence[Any]]) -> float:
    """Return the largest difference between `expected` rows of log-probs and those of any replica."""
    flat = np.concatenate([np.asarray(row) for row in expected])
    return max(float(np.abs(np.concatenate([np.asarray(row) for row in rows]) - flat).max()) for rows in replicas)


def check_proof(proof: dict[str, Any], replicas: Sequence[Sequence[np.ndarray]]) -> float:
    """Return the largest gap between the trainer's and the replicas' log-probs; WeightSyncError above the tolerance."""
    gap, allowed = largest_gap(proof["expected"], replicas), allowed_gap(proof["dtype"])
    if not gap <= allowed:
        raise WeightSyncError(
            f"after the sync the replica's log-probs differ from the trainer's by up to {gap:.2g} (allowed in "
            f"{proof['dtype']}: {allowed:g}). The replica refuses to generate until a sync succeeds: check "
            "postprocess_output_named_parameters and that both engines hold the same architecture, then sync again"
        )
    return gap
