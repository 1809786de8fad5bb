"""Request seeds: one per sample, from session seed, rollout number, prompt and sample alone.

So a sample depends neither on how many others are drawn nor on the replica that draws it.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def request_seeds(session_seed: int, rollout: int, prompts: int, samples: int) -> np.ndarray:
    """Seeds (prompts, samples) int64, non-negative. Mixing: SplitMix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        base = _mix(_mix(np.uint64(session_seed % 2**64)) ^ np.uint64(rollout))
        prompt = _mix(base ^ np.arange(prompts, dtype=np.uint64))[:, None]
        seeds = _mix(prompt ^ np.arange(samples, dtype=np.uint64)[None, :])
    return (seeds >> np.uint64(1)).astype(np.int64)


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    z = np.asarray(x, np.uint64) + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
