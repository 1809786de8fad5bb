"""What several replicas returned, in prompt order: the fields of `Rollouts`, and its lengths in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.data.base.routing import join_routing
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.rollouts.jobs import GeneratedArrays

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts

BINS = 24
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99}


def merged(prompts: Sequence[Prompt], parts: Sequence[GeneratedArrays]) -> dict[str, Any]:
    """Fields of `Rollouts` by name. Prompts that nobody started are listed in `not_started`."""
    keys = np.concatenate([p.keys for p in parts]).reshape(-1, 2)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    offsets = offsets_of(np.concatenate([np.diff(p.offsets) for p in parts]))
    ids = {i: row for p in parts for i, row in p.prompt_token_ids.items()}
    texts = [t for p in parts for t in p.texts]
    started = set(keys[:, 0].tolist())

    def beside_tokens(name: str) -> Ragged:
        return Ragged(np.concatenate([getattr(part, name) for part in parts]), offsets).take(order)

    whole = {
        "prompts": tuple(prompts),
        "prompt_ids": Ragged.from_rows((ids.get(i, []) for i in range(len(prompts))), np.int32),
        "responses": beside_tokens("token_ids"),
        "logprobs": beside_tokens("logprobs").values,
        "group": keys[order, 0].astype(np.int32),
        "finish": np.concatenate([p.finish for p in parts])[order],
        "versions": np.concatenate([p.versions for p in parts])[order],
        "texts": tuple(texts[i] for i in order),
        "not_started": tuple(i for i in range(len(prompts)) if i not in started),
        "stats": joined_stats([part.stats for part in parts], ("seconds", "peak_bytes")),
        "routing": _routing(parts, order),
    }
    if any(part.mask is None for part in parts):
        return whole
    rows = [row for part in parts for row in part.turn_rewards or []]
    infos = [info for part in parts for info in part.infos or []]
    seen = [images for part in parts for images in part.observed_images or ((),) * len(part.finish)]
    rewards = Ragged.from_rows([rows[i] for i in order], np.float64)
    sums = np.array([np.nansum(row) if np.isfinite(row).any() else np.nan for row in rewards], np.float64)
    return whole | {
        "mask": beside_tokens("mask").values,
        "turns": beside_tokens("turns").values,
        "turn_rewards": rewards,
        "env_rewards": sums,
        "rewards": None if np.isnan(sums).all() else sums,
        "infos": tuple(infos[i] for i in order),
        "observed_images": tuple(seen[i] for i in order) if any(seen) else (),
    }


def _routing(parts: Sequence[GeneratedArrays], order: np.ndarray) -> Ragged | None:
    lengths = [
        np.array([len(part.prompt_token_ids[prompt]) for prompt in part.keys[:, 0].tolist()], np.int64)
        + np.diff(part.offsets)
        for part in parts
    ]
    joined = join_routing([part.routing for part in parts], lengths)
    return None if joined is None else joined.take(order)


def joined_stats(stats: Sequence[Mapping[str, float]], highest: Sequence[str]) -> dict[str, float]:
    """Return the statistics of all parts: the largest value of those in `highest`, the sum of the others."""
    names = dict.fromkeys(name for one in stats for name in one)
    return {name: float((max if name in highest else sum)(one.get(name, 0.0) for one in stats)) for name in names}


def length_stats(rollouts: Rollouts) -> dict[str, Any]:
    """Return the lengths of a rollout, whole or stopped, as plain values; None for each without a sample.

    `version`: the newest of the weights; `counts[i]` samples have `edges[i]` to below `edges[i + 1]` tokens.
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
