"""How long the responses of a rollout are, in a few numbers: percentiles, what was cut, a histogram."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlbench.data.rollouts.rollouts import Rollouts

BINS = 24
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}


def length_stats(rollouts: Rollouts) -> dict[str, Any]:
    """Return the lengths of a rollout, whole or stopped, as plain values; None for each without a sample.

    `version` is the newest of the weights, `truncated` the share that hit the length limit, `aborted` the number cut by
    an interrupt; `counts[i]` samples have `edges[i]` to below `edges[i + 1]` tokens, at most 24 whole-number bins.
    """
    lengths = rollouts.lengths
    none = len(lengths) == 0
    edges = histogram_edges(0 if none else int(lengths.max()))
    return {
        "rollout": rollouts.number,
        "version": None if none else int(rollouts.versions.max()),
        "samples": len(lengths),
        "truncated": None if none else float(rollouts.truncated.mean()),
        "aborted": int(rollouts.aborted.sum()),
        **{name: None if none else float(np.percentile(lengths, q)) for name, q in PERCENTILES.items()},
        "max": None if none else int(lengths.max()),
        "edges": edges.tolist(),
        "counts": np.histogram(lengths, edges)[0].tolist(),
    }


def histogram_edges(longest: int) -> np.ndarray:
    """Edges of bins of one whole width that hold 0 to `longest` tokens, int64."""
    width = -(-(longest + 1) // BINS)
    return np.arange(0, longest + 1 + width, width)
