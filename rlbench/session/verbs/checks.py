"""The verbs of a session that look before a run: see `session.checks.preflight` and `session.checks.rehearsal`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from rlbench.dispatch.chain import Step
from rlbench.session.checks import preflight as preflights
from rlbench.session.checks.rehearsal import Rehearsal, rehearse_steps
from rlbench.session.core import SessionCore


def preflight(
    core: SessionCore,
    prompts: Any = None,
    n: int = preflights.SAMPLES,
    sampling: dict[str, Any] | None = None,
    *,
    strict: bool = False,
    **options: Any,
) -> Generator[Step, Any, preflights.Preflight]:
    """Check, before the first step, that the sampler and the trainer agree; nothing is changed.

    Their log-probs on a few samples, the ratio (1) and the KL (0) of a loss on policy, and the weights and their
    versions on both sides.

    Args:
        prompts: what to draw from (default: a few neutral questions); or `Rollouts` or a `TrainBatch`, to check
            those very tokens as they are about to be trained on.
        n: completions per prompt.
        sampling: options by vLLM's names, those you will train with; also as keywords.
        strict: raise `CheckFailed` where it does not pass.

    Returns:
        `Preflight`: `passed`, `checks`, and where it did not pass `worst` (ten tokens) and the probable `cause`.

    Raises:
        StateError: gradients wait for a step, or an engine is offloaded. CheckFailed: with `strict`.
    """
    chosen = {**(sampling or {}), **options}
    return (yield from preflights.preflight_steps(core, prompts, n, chosen, strict))


def rehearse(
    core: SessionCore,
    max_length: int | None = None,
    token_budget: int | None = None,
    *,
    loss: Any = "grpo",
    memory_limit: int | None = None,
    seconds: float = 60.0,
) -> Generator[Step, Any, Rehearsal]:
    """Run the worst case of memory once: a full KV cache, and a micro-batch of longest sequences; changes nothing.

    Args:
        max_length: prompt and response together; default: the replica's max_model_len.
        token_budget: tokens of one micro-batch on one rank; default: the one `train_step` takes.
        loss: as for `train_step`.
        memory_limit: bytes a training rank may use; default: what its GPU, or its share of the host, has.
        seconds: how long the KV cache is filled at most.

    Returns:
        `Rehearsal`: per engine peak, limit and head-room, and the largest safe `token_budget`.

    Raises:
        CheckFailed: it does not fit; says what to lower. StateError: gradients wait for a step, or an engine is
            offloaded.
    """
    steps = rehearse_steps(core, max_length, token_budget, loss, memory_limit, seconds)
    return (yield from steps)
