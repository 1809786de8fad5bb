"""Rollouts made by hand for tests of what happens to them afterwards."""

from __future__ import annotations

import numpy as np

from rlbench.data import FINISH_REASONS, GeneratedArrays, Prompt, Ragged, Rollouts

TEXTS = ("sort 21 :", "sort 312 :", "sort 4 :")


def generated(samples, versions=0, prompt_ids=None, **stats) -> GeneratedArrays:
    """What one replica returned. `samples`: (prompt, sample, token ids, finish reason), in any order."""
    tokens = [np.asarray(ids, np.int32) for _, _, ids, _ in samples]
    flat = Ragged.from_rows(tokens, np.int32)
    keys = np.array([(p, s) for p, s, _, _ in samples], np.int32).reshape(-1, 2)
    return GeneratedArrays(
        keys=keys,
        token_ids=flat.values,
        logprobs=-flat.values.astype(np.float32) / 100,
        offsets=flat.offsets,
        finish=np.array([FINISH_REASONS.index(f) for _, _, _, f in samples], np.int8),
        versions=np.full(len(samples), versions, np.int64),
        texts=[f"p{p}s{s}" for p, s, _, _ in samples],
        prompt_token_ids=prompt_ids or {p: [10 + p] * (p + 1) for p, _, _, _ in samples},
        stats={"tokens": float(len(flat.values)), "seconds": 1.0} | stats,
    )


def rollouts(prompts=TEXTS, labels=("12", "123", "4"), **sampling) -> Rollouts:
    """Three prompts with two completions each, of 1 to 6 tokens; token t has log-prob -t / 100."""
    given = [Prompt(text, label) for text, label in zip(prompts, labels, strict=True)]
    samples = [
        (p, s, range(1 + 2 * p + s), "length" if (p, s) == (2, 1) else "stop") for p in range(3) for s in range(2)
    ]
    return Rollouts.merge(given, [generated(samples)], {"temperature": 1.0} | sampling)
