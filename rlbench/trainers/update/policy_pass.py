"""Passes of one policy over micro-batches: scores without gradient, a loss's plan, and the loss itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import DataError, LossError
from rlbench.rl import Loss, LossInputs
from rlbench.rl.losses import check_sampled_as_trained
from rlbench.strategies.surface.memory_side import reshard
from rlbench.trainers.passes.forward import DUMMY, PolicyModel
from rlbench.trainers.passes.loss_value import evaluate
from rlbench.trainers.passes.metrics import MetricSums, measure
from rlbench.trainers.passes.micro_batch import Slice, loss_inputs
from rlbench.trainers.passes.packing import ModelInputs
from rlbench.trainers.passes.step_plan import NO_PLAN, StepPlan, plan_step
from rlbench.trainers.passes.token_keeper import TokenGradients, TokenKeeper
from rlbench.trainers.update.gradient_step import GradientStep, Pending
from rlbench.trainers.update.options import PolicyOptions

Stats = tuple[Tensor, Tensor, ModelInputs]


class PolicyPass:
    """Of the model whose gradients `step` holds."""

    def __init__(self, step: GradientStep) -> None:
        self._step, self.strategy = step, step.strategy
        self.model = PolicyModel(step.model, self.strategy.device.device, self.strategy.bf16)

    def head_used(self, options: PolicyOptions) -> str:
        """How log-probs come about: "chunked", or "plain" with the reason; "unknown" before the first pass."""
        return "plain: asked for" if options.head == "plain" else self.model.head_used(options.packing)

    def check(self, batch: TrainBatch, options: PolicyOptions, loss: Loss | None = None) -> None:
        """Refuse sequences that cannot be scored, or not be trained on with `loss`."""
        if len(batch) == 0:
            raise DataError("the batch has no sequences; nothing can be computed.")
        if (batch.prompts.lengths < 1).any():
            raise DataError("a sequence has an empty prompt; its first token would be predicted from nothing.")
        self.model.check_tokens(batch)
        if (batch.temperature if options.temperature is None else options.temperature) <= 0:
            raise DataError("the batch was sampled greedily (temperature 0); pass temperature=1.0 to score it.")
        if loss is None:
            return
        if getattr(loss, "needs_reference", False) and batch.ref_logprobs is None:
            raise LossError(
                f"{loss!r} needs ref_logprobs and the batch has none: a reference engine gives them, of a trainer its "
                "initial_model."
            )
        check_sampled_as_trained(loss, repr(loss), batch.reshaped_by)
        stood_in = options.old_logprobs == "sampler" and batch.old_logprobs is None
        if stood_in and getattr(loss, "mismatch", None) is not None:
            raise LossError(
                f"{loss!r} corrects for the sampler, and there are no old_logprobs to compare its own with: use "
                "old_logprobs='recompute'."
            )

    def stats(
        self, batch: TrainBatch, options: PolicyOptions, watch: TokenGradients | None = None
    ) -> AbstractContextManager[Stats]:
        """Log-probs and entropies (R,) of the response tokens; the backward runs inside the context."""
        temperature = batch.temperature if options.temperature is None else options.temperature
        return self.model.stats(batch, temperature, options.packing, options.head, watch, options.tile)

    @torch.no_grad()
    def score(
        self,
        parts: Sequence[Slice],
        count: int,
        options: PolicyOptions,
        doing: str,
        progress: Callable[[int], None] = lambda done: None,
    ) -> dict[str, Any]:
        """Log-probs and entropies without gradient, in `count` passes on every rank; collective.

        Returns:
            `rows` (n,) int64, and `channels`: `logprobs` and `entropy`, each a list of (length,) float32 arrays in the
            same order.
        """
        keeper = TokenKeeper("logprobs", "entropy")
        try:
            for index in range(count):
                part = parts[index] if index < len(parts) else None
                with self.stats(DUMMY if part is None else part.batch, options) as (logprobs, entropy, _):
                    if part is not None:
                        keeper.add(part.rows, part.batch, {"logprobs": logprobs, "entropy": entropy})
                self._step.vote(doing, cleared=False)
                progress(index + 1)
        finally:
            reshard(self._step.model)  # the next step changes the shards, not what is gathered
        return keeper.result()

    def plan(
        self, loss: Loss, parts: Sequence[Slice], count: int, whole: TrainBatch, options: PolicyOptions
    ) -> StepPlan:
        """What the loss says of the whole call, where it wants to see that first; collective."""
        if not getattr(loss, "needs_plan", False):
            return NO_PLAN
        control = self.strategy.control
        scored = control.gather(self.score(parts, count, options, "the pass before the loss's plan"))
        plan: StepPlan = control.together(
            "the loss's plan", lambda: plan_step(loss, whole, scored, options.old_logprobs)
        )
        return plan

    @contextmanager
    def loss(
        self,
        part: Slice | None,
        loss: Loss,
        pending: Pending,
        options: PolicyOptions,
        sums: MetricSums,
        plan: StepPlan = NO_PLAN,
        keep: Callable[[LossInputs, dict[str, Any], Stats], None] = lambda *_: None,
        watch: TokenGradients | None = None,
    ) -> Iterator[tuple[Tensor, Callable[[], Tensor] | None]]:
        """A pass of `GradientStep.run`: the micro-batch's term of the step's loss, counted in `sums`.

        Args:
            part: None: a dummy batch.
            keep: called with what the loss saw and said.
            watch: takes each token's gradients.
        """
        with self.stats(DUMMY if part is None else part.batch, options, watch) as stats:

            def compute() -> Tensor:
                assert part is not None
                view = loss_inputs(part.batch, *stats, options.old_logprobs)
                view = replace(view, channels=plan.of(part.rows, view.mask))
                total, own = evaluate(loss, view, pending.weights(view.mask, view.group))
                with_sampler = part.batch.old_logprobs is not None or options.old_logprobs != "sampler"
                measure(sums, view, own, float(total.detach()), with_sampler)
                keep(view, own, stats)
                return total

            yield stats[0], None if part is None else compute


def slices(batches: Sequence[TrainBatch], first: int = 0) -> list[Slice]:
    """Micro-batches as rows that follow each other from `first` on."""
    ends = first + np.cumsum([len(batch) for batch in batches], dtype=np.int64)
    return [Slice(batch, np.arange(end - len(batch), end)) for batch, end in zip(batches, ends, strict=True)]
