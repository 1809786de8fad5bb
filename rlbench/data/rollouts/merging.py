"""What several replicas returned, in prompt order: the fields of `Rollouts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.rollouts.jobs import GeneratedArrays
from rlbench.data.rollouts.turns import merged_turns


def merged(prompts: Sequence[Prompt], parts: Sequence[GeneratedArrays]) -> dict[str, Any]:
    """Fields of `Rollouts` by name. Prompts that nobody started are listed in `not_started`."""
    keys = np.concatenate([p.keys for p in parts]).reshape(-1, 2)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    offsets = offsets_of(np.concatenate([np.diff(p.offsets) for p in parts]))
    tokens = Ragged(np.concatenate([p.token_ids for p in parts]), offsets).take(order)
    logprobs = Ragged(np.concatenate([p.logprobs for p in parts]), offsets).take(order)
    ids = {i: row for p in parts for i, row in p.prompt_token_ids.items()}
    texts = [t for p in parts for t in p.texts]
    started = set(keys[:, 0].tolist())
    return {
        "prompts": tuple(prompts),
        "prompt_ids": Ragged.from_rows((ids.get(i, []) for i in range(len(prompts))), np.int32),
        "responses": tokens,
        "logprobs": logprobs.values,
        "group": keys[order, 0].astype(np.int32),
        "finish": np.concatenate([p.finish for p in parts])[order],
        "versions": np.concatenate([p.versions for p in parts])[order],
        "texts": tuple(texts[i] for i in order),
        "not_started": tuple(i for i in range(len(prompts)) if i not in started),
        "stats": joined_stats([part.stats for part in parts], ("seconds", "peak_bytes")),
        **merged_turns(parts, offsets, order),
    }


def joined_stats(stats: Sequence[Mapping[str, float]], highest: Sequence[str]) -> dict[str, float]:
    """Return the statistics of all parts: the largest value of those in `highest`, the sum of the others."""
    names = dict.fromkeys(name for one in stats for name in one)
    return {name: float((max if name in highest else sum)(one.get(name, 0.0) for one in stats)) for name in names}
