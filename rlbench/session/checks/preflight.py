"""Preflight: do the sampler and the trainer hold the same weights and compute the same probabilities?

A few completions are drawn, scored by the trainer and compared token by token; the probe that proves a weight sync is
compared on both sides; a loss goes forward and backward on policy, where its ratios must be 1. Nothing is kept: no
gradient, no random state, no rollout number. Where something is off, more is measured until its cause shows
(`rlbench.session.checks.diagnosis`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import Rollouts, TrainBatch
from rlbench.data.base.ragged import Ragged
from rlbench.dispatch.chain import Steps
from rlbench.engines.sync import rows_in_order
from rlbench.errors import CheckFailed, DataError, Suggesting
from rlbench.session.checks import causes
from rlbench.session.checks.diagnosis import (
    SAMPLES,
    Drawn,
    as_trained,
    both_sides_steps,
    cause_steps,
    drawing,
    score_steps,
    tolerance,
)
from rlbench.session.training.loss_check import ship
from rlbench.units import format_number
from rlbench.weights.proof import probe_tokens

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore

TOKENS, ROWS, WORST = 48, 64, 10
QUESTIONS = (
    "Write one sentence about the sea.",
    "Count from one to ten.",
    "What is 17 + 25? Explain.",
    "Name three colours.",
)
REPEAT = 0.1
"""Two passes of one engine over the same tokens round alike: they may differ by a tenth of what two engines may."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what was seen, and what is allowed."""

    name: str
    passed: bool
    seen: str
    allowed: str


@dataclass(frozen=True)
class TokenGap:
    """A sampled token, and its log-prob on both sides. `position`: in the response; `prompt`, `sequence`: whose."""

    text: str
    token_id: int
    position: int
    prompt: int
    sequence: int
    sampler: float
    trainer: float

    @property
    def gap(self) -> float:
        """Trainer minus sampler."""
        return self.trainer - self.sampler


@dataclass(frozen=True)
class Preflight(Suggesting):
    """What a preflight found. `worst`: the ten tokens that differ most; `cause`: why, where it did not pass.

    `diagnostics`: `rb.rl.mismatch_diagnostics` of the sampled tokens.
    """

    checks: tuple[Check, ...]
    worst: tuple[TokenGap, ...]
    cause: str | None
    sequences: int
    tokens: int
    dtype: str
    diagnostics: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True where every check did."""
        return all(check.passed for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        about = f"{self.sequences} sequences, {self.tokens} tokens, {self.dtype}"
        return f"preflight passed · {about}" if self.passed else f"preflight FAILED · {about}"

    def __repr__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [self.headline]
        lines += [
            f"  {'ok  ' if c.passed else 'FAIL'} {c.name:<{width}}  {c.seen}  (allowed {c.allowed})"
            for c in self.checks
        ]
        if self.cause:
            lines.append(f"  probable cause: {self.cause}")
        if not self.passed and self.worst:
            lines.append("  the tokens that differ most:")
            lines += [
                f"    prompt {t.prompt}, sequence {t.sequence}, token {t.position}  {t.text!r}  "
                f"sampler {t.sampler:.4f}  trainer {t.trainer:.4f}  ({t.gap:+.2g})"
                for t in self.worst
            ]
        return "\n".join(lines)


def preflight_steps(session: SessionCore, prompts: Any, n: int, sampling: dict[str, Any], strict: bool) -> Steps:
    """Measure, check, look for the cause; returns a `Preflight`, or raises `CheckFailed` where `strict`."""
    drawn = yield from _drawn(session, prompts, n, sampling)
    batch = drawn.batch
    scored = yield from score_steps(session, batch)
    trainer = scored.logprobs
    onward, metrics = yield from _on_policy(session, batch, trainer)
    sides = yield from both_sides_steps(session, probe_tokens(int(session.inference.info["vocab_size"])))
    weights = _weights(session, batch)
    allowed = tolerance(weights.trainer_dtype)
    gaps = trainer - batch.sampler_logprobs
    repeat = float(np.abs(onward - trainer)[batch.mask].max())
    colder = allowed / min(1.0, batch.temperature)  # logits are divided by it, and with them their rounding
    diagnostics = mismatch(trainer, batch)
    checks = (
        Check(
            "weight versions",
            set(weights.replica_versions) == {weights.trainer_version},
            "replicas " + ", ".join(f"v{v}" for v in weights.replica_versions),
            f"v{weights.trainer_version}",
        ),
        _within("same weights: log-probs of the probe", float(sides.gap.max()), allowed),
        _within("sampled log-probs, largest difference", float(np.abs(gaps[batch.mask]).max()), colder),
        _within("KL of sampler and trainer", diagnostics["k3_kl"], colder**2),
        _within(
            "ratio on policy, distance from 1",
            float(np.abs(np.expm1(onward - trainer))[batch.mask].max()),
            REPEAT * colder,
        ),
        _within("KL on policy", abs(float(metrics["kl"])), (REPEAT * colder) ** 2),
    )
    cause = None
    if not all(check.passed for check in checks):
        cause = yield from cause_steps(session, drawn, weights, scored, 0.0 if repeat <= REPEAT * colder else repeat)
    worst = worst_tokens(batch, trainer, session.tokenizer)
    result = Preflight(
        checks, worst, cause, len(batch), int(batch.mask.sum()), str(session.train.info["dtype"]), diagnostics
    )
    if strict and not result.passed:
        raise CheckFailed(repr(result), result)
    return result


# -- what is compared


def _drawn(session: SessionCore, prompts: Any, n: int, sampling: dict[str, Any]) -> Steps:
    """The tokens to compare: drawn now, or those of the rollouts or the batch that were given."""
    if isinstance(prompts, TrainBatch | Rollouts):
        if sampling or n != SAMPLES:
            raise DataError(
                f"preflight of a {type(prompts).__name__} draws nothing: leave out n and the sampling options"
            )
        batch = prompts if isinstance(prompts, TrainBatch) else as_trained(prompts)
        if not batch.mask.any():
            raise DataError("preflight: the batch has no token to train on, its mask is all False")
        chosen = batch.rows(np.arange(min(len(batch), ROWS)))
        return Drawn(chosen, prompts.sampling if isinstance(prompts, Rollouts) else None)
    if sampling.get("temperature", 1.0) == 0:
        raise DataError("preflight: greedy samples are not trained on; give the temperature you train with")
    contents = default_prompts(session.tokenizer) if prompts is None else prompts
    limit = int(session.inference.info["max_model_len"])
    options = {"max_tokens": max(1, min(TOKENS, limit // 2))} | sampling
    rollouts = yield drawing(session, contents, n, options)
    return Drawn(as_trained(rollouts), options, contents)


def default_prompts(tokenizer: Any) -> list[Any]:
    """Neutral questions, through the tokenizer's own chat template where it has one."""
    if getattr(tokenizer, "chat_template", None) is None:
        return list(QUESTIONS)
    return [[{"role": "user", "content": question}] for question in QUESTIONS]


def _on_policy(session: SessionCore, batch: TrainBatch, trainer: np.ndarray) -> Steps:
    """Log-probs and metrics of a forward and backward whose old policy is the trainer's own, just scored."""
    shipped = ship("grpo", batch)

    def finish(parts: list[dict[str, Any]]) -> tuple[np.ndarray, dict[str, Any]]:
        return Ragged.from_rows(rows_in_order(parts)["logprobs"], np.float32).values, dict(parts[0]["metrics"])

    own = batch.replace(old_logprobs=trainer, ref_logprobs=None)
    return (yield session.train.call_all("policy_trial", own, {}, shipped.blob, finish=finish, what="preflight"))


def _weights(session: SessionCore, batch: TrainBatch) -> causes.Weights:
    return causes.Weights(
        session.version,
        tuple(session.inference.weight_versions()),
        tuple(np.unique(batch.weight_version).tolist()),
        str(session.train.info["dtype"]),
        str(session.inference.info["dtype"]),
    )


def mismatch(trainer: np.ndarray, batch: TrainBatch) -> dict[str, float]:
    """`rb.rl.mismatch_diagnostics` of a batch."""
    import torch

    from rlbench.rl import mismatch_diagnostics

    width = int(batch.response_lengths.max())

    def padded(values: np.ndarray) -> torch.Tensor:
        out = torch.zeros(len(batch), width, dtype=torch.float64)
        for i, row in enumerate(batch.responses.with_values(values)):
            out[i, : len(row)] = torch.as_tensor(np.array(row, np.float64))
        return out

    mask = padded(batch.mask.astype(np.float64)) > 0
    return mismatch_diagnostics(padded(trainer), padded(batch.sampler_logprobs), mask)


def worst_tokens(batch: TrainBatch, trainer: np.ndarray, tokenizer: Any) -> tuple[TokenGap, ...]:
    """The trained tokens whose log-probs differ most, the largest difference first."""
    gap = np.where(batch.mask, np.abs(trainer - batch.sampler_logprobs), -1.0)
    found = []
    for token in np.argsort(-gap, kind="stable")[: min(WORST, int(batch.mask.sum()))]:
        row = int(np.searchsorted(batch.responses.offsets, token, side="right")) - 1
        token_id = int(batch.responses.values[token])
        found.append(
            TokenGap(
                tokenizer.decode([token_id]),
                token_id,
                int(token - batch.responses.offsets[row]),
                int(batch.group[row]),
                row,
                float(batch.sampler_logprobs[token]),
                float(trainer[token]),
            )
        )
    return tuple(found)


def _within(name: str, seen: float, allowed: float) -> Check:
    return Check(name, bool(seen <= allowed), format_number(seen), f"≤ {format_number(allowed)}")
