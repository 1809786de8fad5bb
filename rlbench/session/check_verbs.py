"""The verbs of a session that look before a run: see `rlbench.session.preflight` and `rlbench.session.rehearsal`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rlbench.session import preflight as preflights
from rlbench.session.recording import recorded
from rlbench.session.rehearsal import rehearse_steps

if TYPE_CHECKING:
    from rlbench.session.session import Session


class CheckVerbs:
    """What `Session` inherits: preflight, rehearse."""

    @recorded
    def preflight(
        self,
        prompts: Any = None,
        n: int = preflights.SAMPLES,
        sampling: dict[str, Any] | None = None,
        *,
        strict: bool = False,
        block: bool = True,
        **options: Any,
    ) -> Any:
        """Check, before the first step, that the sampler and the trainer agree; nothing is changed.

        Their log-probs on a few samples, the ratio (1) and the KL (0) of a loss on policy, and the weights and their
        versions on both sides.

        Args:
            prompts: what to draw from (default: a few neutral questions); or `Rollouts` or a `TrainBatch`, to check
                those very tokens as they are about to be trained on.
            n: completions per prompt.
            sampling: options by vLLM's names, those you will train with; also as keywords.
            strict: raise `CheckFailed` where it does not pass.
            block: False returns a `Pending` at once.

        Returns:
            `Preflight`: `passed`, `checks`, and where it did not pass `worst` (ten tokens) and the probable `cause`.

        Raises:
            StateError: gradients wait for a step, or an engine is offloaded. CheckFailed: with `strict`.
        """
        me = cast("Session", self)
        chosen = {**(sampling or {}), **options}
        return me._run("preflight", preflights.preflight_steps(me, prompts, n, chosen, strict), block)

    @recorded
    def rehearse(
        self,
        max_length: int | None = None,
        token_budget: int | None = None,
        *,
        loss: Any = "grpo",
        memory_limit: int | None = None,
        seconds: float = 60.0,
        block: bool = True,
    ) -> Any:
        """Run the worst case of memory once: a full KV cache, and a micro-batch of longest sequences; changes nothing.

        Args:
            max_length: prompt and response together; default: the replica's max_model_len.
            token_budget: tokens of one micro-batch on one rank; default: the one `train_step` takes.
            loss: as for `train_step`.
            memory_limit: bytes a training rank may use; default: what its GPU, or its share of the host, has.
            seconds: how long the KV cache is filled at most.
            block: False returns a `Pending` at once.

        Returns:
            `Rehearsal`: per engine peak, limit and head-room, and the largest safe `token_budget`.

        Raises:
            CheckFailed: it does not fit; says what to lower. StateError: gradients wait for a step, or an engine is
                offloaded.
        """
        me = cast("Session", self)
        steps = rehearse_steps(me, max_length, token_budget, loss, memory_limit, seconds)
        return me._run("rehearse", steps, block)
