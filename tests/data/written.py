"""Rollouts of given texts for the tiny model's byte tokenizer, with the channels a step gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlbench.data import FINISH_REASONS, Prompt, Ragged, Rollouts
from rlbench.data.record.metrics import Metrics

END = 257  # <|end|> of the tiny tokenizer, whose other ids are bytes


def written(
    prompts: Sequence[Any],
    answers: Sequence[Sequence[str | bytes]],
    finish: Sequence[str] | None = None,
    tokenizer: Any = "",
    version: int = 41,
) -> Rollouts:
    """`answers[p]` are the completions of prompt p, each ended by `<|end|>`; bytes may be broken UTF-8."""
    raw = [a if isinstance(a, bytes) else a.encode() for row in answers for a in row]
    responses = Ragged.from_rows([[*a, END] for a in raw], np.int32)
    count = len(raw)
    finish = ["stop"] * count if finish is None else finish
    return Rollouts(
        prompts=tuple(p if isinstance(p, Prompt) else Prompt(p) for p in prompts),
        prompt_ids=Ragged.from_rows([[1, 2, 3 + p] for p in range(len(prompts))], np.int32),
        responses=responses,
        logprobs=-np.abs(np.sin(np.arange(len(responses.values)))).astype(np.float32),
        group=np.repeat(np.arange(len(answers)), [len(row) for row in answers]).astype(np.int32),
        finish=np.array([FINISH_REASONS.index(f) for f in finish], np.int8),
        versions=np.full(count, version, np.int64),
        texts=tuple(a.decode("utf-8", "replace") for a in raw),
        sampling={"temperature": 1.0},
        tokenizer=str(tokenizer),
    )


def spelling(folder: Any, pieces: Sequence[str], special: str = "<|end|>") -> str:
    """A tokenizer whose token i is `pieces[i]`, and then a special one; saved in `folder`, which is returned."""
    from tokenizers import AddedToken, Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False)])
    tokenizer.save(f"{folder}/tokenizer.json")
    return str(folder)


def sorting(tokenizer: Any = "", prompts: int = 4, samples: int = 4, scored: bool = True) -> Rollouts:
    """Sums to sort: the first prompt all right, the last all wrong, mixed between; every fifth is truncated."""
    digits = [f"{52143 + 1111 * p}" for p in range(prompts)]
    right = [[p == 0 or (p < prompts - 1 and (p + s) % 2 == 0) for s in range(samples)] for p in range(prompts)]
    answers = [
        ["".join(sorted(d)) if r else f"{d} {'again ' * s}" for s, r in enumerate(row)]
        for d, row in zip(digits, right, strict=True)
    ]
    finish = ["length" if i % 5 == 4 else "stop" for i in range(prompts * samples)]
    made = written([f"sort {d} :" for d in digits], answers, finish, tokenizer)
    return made.score([float(r) for row in right for r in row]) if scored else made


def stepped(rollouts: Rollouts) -> Rollouts:
    """With a step's channels: the trainer 0.1 nats above the sampler (0.5 in the last completion), and a mask."""
    batch = rollouts.batch(lambda rewards, group: rewards - rewards.mean())
    off = np.full(batch.tokens, 0.1, np.float32)
    off[batch.responses.offsets[-2] :] = 0.5
    trainer = batch.sampler_logprobs + off
    step = {
        "logprobs": trainer,
        "old_logprobs": batch.sampler_logprobs,
        "ref_logprobs": trainer - 0.2,
        "entropy": off * 2,
        "clip_fraction": (off > 0.3).astype(np.float32),
    }
    mask = batch.mask.copy()
    mask[0] = False
    return rollouts.with_batch(batch.replace(mask=mask), Metrics({"loss": 0.0}, step))
