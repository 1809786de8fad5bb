"""Passes of one policy over micro-batches: scores without gradient, a loss's plan, and the loss itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbench.data.batches.batch import TrainBatch
from rlbench.data.batches.columns import TEACHER_IDS
from rlbench.data.batches.pairing import check_pairs
from rlbench.errors import DataError, LossError
from rlbench.rl import Loss, LossInputs
from rlbench.rl.losses import check_sampled_as_trained
from rlbench.rl.types import needs_of
from rlbench.strategies.memory.offloading import reshard
from rlbench.trainers.models.scalar_model import ScalarHeadModel
from rlbench.trainers.models.score_model import ScoreModel
from rlbench.trainers.passes.balancing import BALANCE
from rlbench.trainers.passes.chunked_head import hidden_size
from rlbench.trainers.passes.forward import DUMMY, PolicyModel
from rlbench.trainers.passes.loss_value import evaluate
from rlbench.trainers.passes.metrics import MetricSums, measure
from rlbench.trainers.passes.outputs import Request, TokenOutputs
from rlbench.trainers.passes.packing import ModelInputs
from rlbench.trainers.passes.routing import DISAGREEMENT, check_experts, check_routed
from rlbench.trainers.passes.step_plan import Slice, loss_inputs, plan_step
from rlbench.trainers.passes.token_keeper import TokenGradients, TokenKeeper
from rlbench.trainers.update.gradient_step import GradientStep, PendingStep
from rlbench.trainers.update.options import PolicyOptions

Stats = tuple[TokenOutputs, ModelInputs]


class PolicyPass:
    """Of the model whose gradients `step` holds; `replay`: its routers take the experts of the sampler."""

    def __init__(self, step: GradientStep, replay: bool = False) -> None:
        self._step, self.strategy = step, step.strategy
        kind = ScoreModel if isinstance(step.model, ScalarHeadModel) else PolicyModel
        half = self.strategy.half is not None
        ranks, control = self.strategy.sequence, self.strategy.control
        self.model = kind(step.model, self.strategy.device.device, half, ranks, control, replay)

    def head_used(self, options: PolicyOptions) -> str:
        """How log-probs come about: "chunked", or "plain" with the reason; "unknown" before the first pass."""
        return "plain: asked for" if options.head == "plain" else self.model.head_used(options.packed)

    def check(self, batch: TrainBatch, options: PolicyOptions, loss: Loss | None = None) -> None:
        """Refuse sequences that cannot be scored, or not be trained on with `loss`."""
        if len(batch) == 0 or (batch.prompts.lengths < 1).any():
            raise DataError("the batch has no sequences, or one with an empty prompt; nothing can be computed.")
        self.model.check_tokens(batch)
        check_experts(self.model.module, batch)
        if options.share_prompts:
            self.model.check_shared(batch)
        if (batch.temperature if options.temperature is None else options.temperature) <= 0:
            raise DataError("the batch was sampled greedily (temperature 0); pass temperature=1.0 to score it.")
        needs = options.needs if loss is None else needs_of(loss)
        if "teacher" in needs and TEACHER_IDS in batch.columns:
            self.model.check_tokens(batch, batch.columns[TEACHER_IDS])
        whose = "a loss" if loss is None else repr(loss)
        if "hidden_states" in needs and hidden_size(self.model.module) is None:
            raise LossError(f"{whose} needs hidden states, and the model does not say which is its output layer.")
        if "logits" in needs and options.head == "chunked":
            raise LossError(f"{whose} needs the logits, which head='chunked' never makes: head='auto' or 'plain'.")
        if options.top_k > self.model.vocab_size:
            raise DataError(f"top_k={options.top_k}: the model has {self.model.vocab_size} tokens")
        if loss is None:
            return
        if getattr(loss, "needs_reference", False) and batch.ref_logprobs is None:
            raise LossError(f"{loss!r} needs ref_logprobs, and the batch has none: give a reference (initial_model).")
        if getattr(loss, "needs_pairs", False):
            check_pairs(batch)
        if batch.verdicts is not None and batch.verdicts.heads != self.model.heads:
            raise LossError(
                f"the pairs judge the heads {', '.join(batch.verdicts.heads)}, and the model has "
                f"{', '.join(self.model.heads) or 'none with a name'}: batch.verdicts.of_heads(names) sorts them."
            )
        check_sampled_as_trained(loss, repr(loss), batch.reshaped_by, sampled=batch.sampled)
        if self.model.replay:
            check_routed(batch)
        stood_in = options.old_logprobs == "sampler" and batch.old_logprobs is None
        if stood_in and getattr(loss, "mismatch", None) is not None:
            raise LossError(
                f"{loss!r} corrects for the sampler, and there are no old_logprobs: old_logprobs='recompute'."
            )

    def stats(
        self,
        batch: TrainBatch,
        options: PolicyOptions,
        watch: TokenGradients | None = None,
        needs: Sequence[str] = (),
        top_k: int = 0,
        balance: bool = False,
    ) -> AbstractContextManager[Stats]:
        """Log-probs and entropies (R,) of the response tokens, and what `needs` and `top_k` ask for; the backward runs
        inside the context."""
        temperature = batch.temperature if options.temperature is None else options.temperature
        request = Request.of(needs, batch, self.model.device, top_k)
        given = (batch, temperature, options.packed, options.head, watch, options.tile, request)
        return self.model.stats(*given, balance=balance, share_prompts=options.share_prompts)

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

        Gives `rows` (n,) int64, and `channels`: each ragged float32 in the same order, also what the options ask for.
        """
        keeper = TokenKeeper(*self.model.CHANNELS)
        try:
            for index in range(count):
                part = parts[index] if index < len(parts) else None
                given = DUMMY if part is None else part.batch
                with self.stats(given, options, needs=options.needs, top_k=options.top_k) as (found, _):
                    if part is not None:
                        keeper.add(part.rows, part.batch, found.channels())
                self._step.vote(doing, cleared=False)
                progress(index + 1)
        finally:
            reshard(self._step.model)  # the next step changes the shards, not what is gathered
        return keeper.result()

    def plan(
        self, loss: Loss, parts: Sequence[Slice], count: int, whole: TrainBatch, options: PolicyOptions
    ) -> dict[str, Tensor]:
        """What the loss says of the whole call, where it wants to see that first; collective."""
        if not getattr(loss, "needs_plan", False):
            return {}
        control = self.strategy.control
        scored = control.gather(self.score(parts, count, options, "the pass before the loss's plan"))
        return control.together("the loss's plan", lambda: plan_step(loss, whole, scored, options.old_logprobs))

    @contextmanager
    def loss(
        self,
        part: Slice | None,
        loss: Loss,
        pending: PendingStep,
        options: PolicyOptions,
        sums: MetricSums,
        plan: Mapping[str, Tensor] = MappingProxyType({}),
        keep: Callable[[LossInputs, dict[str, Any], Stats], None] = lambda *_: None,
        watch: TokenGradients | None = None,
    ) -> Iterator[tuple[Tensor, Callable[[], Tensor] | None]]:
        """A pass of `GradientStep.run`: a micro-batch's (None: a dummy's) term of the step's loss, counted in `sums`.

        `keep` is called with what the loss saw and said; `watch` takes each token's gradients.
        """
        given = DUMMY if part is None else part.batch
        needs, balance = () if part is None else needs_of(loss), options.aux_loss_coef > 0
        with self.stats(given, options, watch, needs, balance=balance) as (found, inputs):

            def compute() -> Tensor:
                assert part is not None
                view = loss_inputs(part.batch, found, inputs.grid, options.old_logprobs)
                rows, width, device = torch.from_numpy(part.rows), view.mask.shape[1], view.mask.device
                planned = {name: whole[rows, :width].to(device) for name, whole in plan.items()}
                view = replace(view, channels={**view.channels, **planned})
                weights = pending.weights(view.mask, view.group)
                total, own = evaluate(loss, view, weights)
                with_sampler = part.batch.old_logprobs is not None or options.old_logprobs != "sampler"
                measure(sums, view, own, float(total.detach()), with_sampler)
                if inputs.routing is not None:
                    sums.mean(DISAGREEMENT, *inputs.routing.disagreement())
                keep(view, own, (found, inputs))
                return total + balancing(inputs, weights * view.mask, options.aux_loss_coef, sums)

            yield found.trained, None if part is None else compute


def balancing(inputs: ModelInputs, weights: Tensor, coef: float, sums: MetricSums) -> Tensor | float:
    """Return what routers that spread tokens unevenly add to a loss whose tokens weigh `weights` (S, T): `coef` times
    each sequence's own, as if it stood in the loss of each of its trained tokens; count it in `sums`."""
    if inputs.balance is None:
        return 0.0
    rows, shares = inputs.balance.of_rows(), weights.sum(dim=-1)
    trained = shares > 0
    sums.mean(BALANCE, float(rows.detach()[trained].sum()), float(trained.sum()))
    return coef * (rows * shares).sum()


def slices(batches: Sequence[TrainBatch], first: int = 0) -> list[Slice]:
    """Micro-batches as rows that follow each other from `first` on."""
    ends = first + np.cumsum([len(batch) for batch in batches], dtype=np.int64)
    return [Slice(batch, np.arange(end - len(batch), end)) for batch, end in zip(batches, ends, strict=True)]
