"""Preflight: do the sampler and the trainer hold the same weights and compute the same probabilities?

Where something is off, more is measured until its cause shows (`rlbench.session.checks.diagnosis`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlbench.data import Rollouts, TrainBatch
from rlbench.data.base.ragged import rows_in_order
from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.errors import CheckFailed, DataError, Suggesting
from rlbench.session.checks.diagnosis import Weights, as_trained, both_sides_steps, cause_steps, score_steps
from rlbench.session.core import SessionCore
from rlbench.session.training.loss_check import ship
from rlbench.units import format_number
from rlbench.weights.probe import Probe
from rlbench.weights.sync import allowed_gap

SAMPLES, TOKENS, ROWS, WORST = 4, 48, 64, 10
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


def preflight(
    core: SessionCore,
    prompts: Any = None,
    n: int = SAMPLES,
    sampling: dict[str, Any] | None = None,
    *,
    strict: bool = False,
    **options: Any,
) -> Generator[ChainStep, Any, Preflight]:
    """Check, before the first step, that the sampler and the trainer agree; nothing is changed.

    Their log-probs on a few samples, the ratio (1) and the KL (0) of a loss on policy, and the weights and their
    versions on both sides. Where it did not pass, `worst` has ten tokens and `cause` why.

    Args:
        prompts: what to draw from (default: a few neutral questions); or `Rollouts` or a `TrainBatch`, to check
            those very tokens as they are about to be trained on.
        n: completions per prompt.
        sampling: options by vLLM's names, those you will train with; also as keywords.
        strict: raise `CheckFailed` where it does not pass.
    """
    batch = yield from _drawn(core, prompts, n, {**(sampling or {}), **options})
    train, infer = core.train.info, core.inference.info
    trainer = yield from score_steps(core, batch)
    onward, metrics = yield from _on_policy(core, batch, trainer)
    sides = yield from both_sides_steps(core, Probe.of(infer))
    versions, drawn = tuple(core.inference.weight_versions()), tuple(np.unique(batch.weight_version).tolist())
    weights = Weights(core.version, versions, drawn, str(train["dtype"]), str(infer["dtype"]))
    allowed = allowed_gap(weights.trainer_dtype)
    colder = allowed / min(1.0, batch.temperature)  # logits are divided by it, and with them their rounding
    gap, drift = np.abs(trainer - batch.sampler_logprobs)[batch.mask].max(), (onward - trainer)[batch.mask]
    diagnostics = _mismatch(trainer, batch)
    held = "replicas " + ", ".join(f"v{v}" for v in versions)
    in_step = set(versions) == {weights.trainer_version}
    numbers = (
        ("same weights: log-probs of the probe", sides.gap.max(), allowed),
        ("sampled log-probs, largest difference", gap, colder),
        ("KL of sampler and trainer", diagnostics["k3_kl"], colder**2),
        ("ratio on policy, distance from 1", np.abs(np.expm1(drift)).max(), REPEAT * colder),
        ("KL on policy", abs(metrics["kl"]), (REPEAT * colder) ** 2),
    )
    checks = (
        Check("weight versions", in_step, held, f"v{weights.trainer_version}"),
        *(
            Check(name, bool(seen <= most), format_number(float(seen)), f"≤ {format_number(most)}")
            for name, seen, most in numbers
        ),
    )
    cause = None
    if not all(check.passed for check in checks):
        repeat = float(np.abs(drift).max())
        cause = yield from cause_steps(core, batch, weights, trainer, repeat if repeat > REPEAT * colder else 0.0)
    worst = _worst_tokens(batch, trainer, core.tokenizer)
    result = Preflight(checks, worst, cause, len(batch), int(batch.mask.sum()), weights.trainer_dtype, diagnostics)
    if strict and not result.passed:
        raise CheckFailed(repr(result), result)
    return result


# -- what is compared


def _drawn(core: SessionCore, prompts: Any, n: int, sampling: dict[str, Any]) -> Steps:
    """Return the tokens to compare: drawn now, or those of the rollouts or the batch that were given."""
    if isinstance(prompts, TrainBatch | Rollouts):
        if sampling or n != SAMPLES:
            kind = type(prompts).__name__
            raise DataError(f"preflight of a {kind} draws nothing: leave out n and the sampling options")
        batch = prompts if isinstance(prompts, TrainBatch) else as_trained(prompts)
        if not batch.mask.any():
            raise DataError("preflight: the batch has no token to train on, its mask is all False")
        return batch.rows(np.arange(min(len(batch), ROWS)))
    if sampling.get("temperature", 1.0) == 0:
        raise DataError("preflight: greedy samples are not trained on; give the temperature you train with")
    if prompts is None:
        chat = getattr(core.tokenizer, "chat_template", None) is not None
        prompts = [[{"role": "user", "content": text}] for text in QUESTIONS] if chat else list(QUESTIONS)
    limit = int(core.inference.info["max_model_len"])
    options = {"max_tokens": max(1, min(TOKENS, limit // 2))} | sampling
    # rollout 0 does not count, so that no later sample changes
    return as_trained((yield core.inference.submit_generate(prompts, options, n=n, progress=False, number=0)))


def _on_policy(core: SessionCore, batch: TrainBatch, trainer: np.ndarray) -> Steps:
    """Go forward and backward where the old policy is the trainer's own, just scored; returns log-probs and metrics."""

    def finish(parts: list[dict[str, Any]]) -> tuple[np.ndarray, dict[str, Any]]:
        return rows_in_order(parts)["logprobs"].values, dict(parts[0]["metrics"])

    own, loss = batch.replace(old_logprobs=trainer, ref_logprobs=None), ship("grpo", batch).blob
    return (yield core.train.call_all("policy_trial", own, {}, loss, finish=finish, what="preflight"))


def _mismatch(trainer: np.ndarray, batch: TrainBatch) -> dict[str, float]:
    from rlbench.rl import mismatch_diagnostics
    from rlbench.trainers.passes.step_plan import pad_rows

    channels = (trainer, batch.sampler_logprobs, batch.mask)
    padded = [pad_rows(batch.responses.with_values(values)).double() for values in channels]
    return mismatch_diagnostics(padded[0], padded[1], padded[2] > 0)


def _worst_tokens(batch: TrainBatch, trainer: np.ndarray, tokenizer: Any) -> tuple[TokenGap, ...]:
    """Return the trained tokens whose log-probs differ most, the largest difference first."""
    gap = np.where(batch.mask, np.abs(trainer - batch.sampler_logprobs), -1.0)
    order = np.argsort(-gap, kind="stable")[: min(WORST, int(batch.mask.sum()))]
    rows = np.searchsorted(batch.responses.offsets, order, side="right") - 1
    return tuple(
        TokenGap(
            tokenizer.decode([int(batch.responses.values[token])]),
            int(batch.responses.values[token]),
            int(token - batch.responses.offsets[row]),
            int(batch.group[row]),
            int(row),
            float(batch.sampler_logprobs[token]),
            float(trainer[token]),
        )
        for token, row in zip(order, rows, strict=True)
    )
