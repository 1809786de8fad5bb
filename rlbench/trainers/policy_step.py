"""One rank's part of a policy update: forward, forward_backward, optim_step.

Every rank holds the whole batch and makes the same plan; each computes its own rows. Ranks vote before every
backward, so that a stop or a failure on one ends the call on all with gradients cleared. The loss is
normalised over the whole optimizer step: all micro-batches, all ranks, and all `forward_backward` calls since
the last step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rlbench.data.batch import TrainBatch
from rlbench.errors import DataError, EngineError, LossError, Stopped
from rlbench.rl import Aggregation, BatchTotals, Loss
from rlbench.strategies.control import Verdict
from rlbench.strategies.fsdp2 import FSDPV2Strategy
from rlbench.strategies.gradients import scale_gradients
from rlbench.strategies.memory_side import holds_gradients, reshard
from rlbench.strategies.optimizer_set import Stepped
from rlbench.trainers.clock import Clock
from rlbench.trainers.forward import PolicyModel, as_batch
from rlbench.trainers.loss_value import LossCache, evaluate
from rlbench.trainers.metrics import MetricSums, measure, merged
from rlbench.trainers.micro_batch import loss_inputs, said_per_token, totals_of
from rlbench.trainers.options import PolicyOptions
from rlbench.trainers.packing import plan_micro_batches
from rlbench.trainers.step_plan import NO_PLAN, StepPlan, plan_step
from rlbench.trainers.token_keeper import TokenGradients, TokenKeeper
from rlbench.user_code import user_code

Report = Callable[..., None]


@dataclass(frozen=True)
class _Pending:
    """What the gradients that wait for a step are normalised by."""

    totals: BatchTotals
    aggregation: Aggregation
    whole_step: bool


class PolicyStep:
    """Policy verbs over one sharded module.

    Args:
        module: sharded, with its weights.
        strategy: the rank's.
        stop_requested: asked before each backward.
        report: called with progress (`done`, `total` micro-batches of this rank, `phase`; in the backward phase also
            its `tokens` so far and, of those that are trained on, `trained` and their part of the `loss`).
        optimizer: gives the one that has a say in the backward (`use_mp_opt`), or None.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: FSDPV2Strategy,
        stop_requested: Callable[[], bool],
        report: Report,
        optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None,
    ) -> None:
        self.module = module
        self.strategy = strategy
        self._stop_requested = stop_requested
        self._report = report
        self._optimizer = optimizer
        self._model = PolicyModel(module, strategy.device.device, strategy.bf16)
        self._losses = LossCache()
        self._pending: _Pending | None = None
        self._token_gradients: list[TokenKeeper] = []  # of the batches whose gradients wait

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self._model.vocab_size

    # -- verbs -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: TrainBatch, options: PolicyOptions) -> dict[str, Any]:
        """Log-probs and entropies without gradient, of this rank's rows; collective.

        Returns:
            `rows` (n,) int64, and `channels`: `logprobs` and `entropy`, each a list of (length,) float32 arrays in
            the same order.
        """
        clock = Clock()
        mine, temperature = self._prepare(batch, options)
        kept = TokenKeeper("logprobs", "entropy")
        for step, rows in enumerate(mine):
            with self._resharded_on_failure():
                with clock("forward"):
                    part = batch.rows(rows) if len(rows) else _fill()
                    with self._model.stats(part, temperature, options.packing, options.head) as found:
                        if len(rows):
                            kept.add(rows, part, {"logprobs": found[0], "entropy": found[1]})
                self._vote(self._own_verdict(), "forward", clock)
            self._report(phase="forward", done=step + 1, total=len(mine))
        reshard(self.module)  # the next step changes the shards, not what is gathered
        return {**kept.result(), "seconds": dict(clock.seconds)}

    def forward_backward(self, batch: TrainBatch, loss_blob: bytes, options: PolicyOptions) -> dict[str, Any]:
        """Add the gradients of `batch` to those that wait for the next step; collective.

        Args:
            batch: the whole batch, on every rank.
            loss_blob: a loss, or the name of one, by cloudpickle.

        Returns:
            `metrics` (of all ranks; equal on each), `aggregation`, `head`, `micro_batches`, `computed` (tokens the rank
            ran through the model) and `padding` (how many of them belong to no row), `seconds` by phase, and as
            `forward` returns them the `rows` of this rank and their `channels`: also `old_logprobs`, `ref_logprobs`
            where there are any, and what the loss's metrics say per token.

        Raises:
            LossError: the loss gave something that cannot be trained on (gradients are cleared).
            Stopped: somebody asked to stop (gradients are cleared, random state is as before the call).
        """
        clock = Clock()
        control = self.strategy.control
        loss = control.together("loading the loss", lambda: self._losses.load(loss_blob))
        mine, temperature = self._prepare(batch, options)
        _check_reference(loss, batch)
        plan = self._plan(loss, batch, options, clock)
        pending, share = self._join_pending(batch, _aggregation(loss, options), options.whole_step)
        sums, kept, computed, tokens = MetricSums(), TokenKeeper("logprobs", "entropy"), 0, 0
        felt = TokenKeeper(*TokenGradients.NAMES)
        random_state = self.strategy.device.rng_state()
        for step, rows in enumerate(mine):
            with self._cleared_on_failure(random_state):
                part = batch.rows(rows) if len(rows) else _fill()
                begin = time.perf_counter()
                watch = self._watch(options) if len(rows) else None
                with ExitStack() as within:
                    logprobs, entropy, inputs = within.enter_context(
                        self._model.stats(part, temperature, options.packing, options.head, watch)
                    )
                    begin = clock.add("forward", begin)
                    total = logprobs.sum() * 0.0  # a fill: the collectives of a backward, and no gradient
                    failure: Exception | None = None
                    try:
                        if len(rows):
                            computed, tokens = computed + inputs.input_ids.numel(), tokens + sum(inputs.lengths)
                            view = loss_inputs(part, logprobs, entropy, inputs, options)
                            view = replace(view, channels=plan.of(rows, view.mask))
                            weights = pending.aggregation.weights(view.mask, pending.totals, view.group)
                            total, own = evaluate(loss, view, weights)
                            measure(sums, view, own, float(total.detach()) / share)
                    except Exception as error:  # of a user's loss: the vote ends the call
                        failure = error
                    clock.add("loss", begin)
                    self._vote(self._own_verdict(failure), "forward_backward", clock, failure)
                    with clock("backward"), user_code():
                        self.strategy.backward(total, self.module, self._optimizer(), reduction="sum")
                if watch is not None:
                    felt.add(rows, part, watch.channels())
                if len(rows) and options.keep_tokens:
                    said = said_per_token(view, own, inputs.grid)
                    kept.add(rows, part, {"logprobs": logprobs, "entropy": entropy, **said})
            self._report(phase="backward", done=step + 1, total=len(mine), tokens=tokens, **sums.so_far())
        with self._cleared_on_failure(random_state):
            control.together("the loss's calls", lambda: self._losses.need_unchanged(loss_blob))
        self._pending = pending
        if not options.whole_step:
            self._token_gradients.append(felt)
        metrics = merged(control.gather(sums))
        return {
            "metrics": metrics,
            "aggregation": pending.aggregation.mode,
            "head": "plain" if options.head == "plain" else self._model.head_used(options.packing),
            "micro_batches": len(mine),
            "computed": computed,
            "padding": computed - tokens,
            "seconds": dict(clock.seconds),
            **kept.result(),
        }

    def optim_step(
        self,
        optimizer: Stepped,
        scheduler: Any = None,
        max_norm: float | None = None,
        whole_step: bool = False,
        rates: Sequence[float] | None = None,
    ) -> dict[str, Any]:
        """Clip and step; collective. Once the last vote is passed the step completes.

        Args:
            scheduler: stepped afterwards: one, several by name, or None.
            whole_step: the second half of a `train_step`; otherwise gradients of half a one are not stepped with.
            rates: learning rates of the optimizer's groups for this step alone; None: those they have.

        Returns:
            `metrics` (`grad_norm` before clipping, `lr` of the first group in this step,
            and with `rates` `lr_usual`), `stepped`, and `skipped`: the reason, or None.

        Raises:
            EngineError: no gradient waits. Stopped: gradients are cleared and nothing was stepped.
        """
        if not whole_step:
            self._drop_stale()
        if not holds_gradients(self.module):
            raise EngineError("there is no gradient to step with; call forward_backward(batch, loss) first.")
        clock = Clock()
        usual = float(optimizer.param_groups[0]["lr"])
        rate = usual if rates is None else rates[0]
        with self._cleared_on_failure():
            self._vote(self._own_verdict(), "optim_step", clock)
            with clock("step"):
                result = self.strategy.step_now(optimizer, self.module, scheduler, max_norm=max_norm, rates=rates)
        self._pending, self._token_gradients = None, []
        metrics = {"grad_norm": result["grad_norm"], "lr": rate}
        if rates is not None:
            metrics["lr_usual"] = usual
        return {
            "metrics": metrics,
            "stepped": result["stepped"],
            "skipped": result["skipped"],
            "seconds": dict(clock.seconds),
        }

    def _drop_stale(self) -> None:
        """Forget the gradients of a whole step whose driver went away before its second half, and what is known of
        gradients that somebody cleared (a cell of the user's, a checkpoint that was loaded)."""
        if self._pending is not None and (self._pending.whole_step or not holds_gradients(self.module)):
            self.zero_grad()

    def zero_grad(self) -> None:
        """Gradients gone and parameters back to shards: forget what waits for a step, or ended in the middle."""
        self.strategy.forget_gradients(self.module)
        self._pending, self._token_gradients = None, []

    @property
    def waiting(self) -> bool:
        """Whether gradients wait for a step."""
        self._drop_stale()
        return holds_gradients(self.module)

    def token_gradients(self) -> list[dict[str, Any]]:
        """`rows` and `channels` (see `TokenGradients`) of this rank, for each batch whose gradients wait."""
        self._drop_stale()
        return [felt.result() for felt in self._token_gradients]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put away the gradients that wait; they come back as they were, bit for bit, whatever happens inside."""
        self._drop_stale()
        reshard(self.module)  # a gathered parameter shows not the gradient of its shard
        held = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        pending, felt = self._pending, self._token_gradients
        self.module.zero_grad(set_to_none=True)  # the strategy's count of them stays
        self._pending, self._token_gradients = None, []
        try:
            yield
        finally:
            reshard(self.module)
            for parameter, gradient in held:
                parameter.grad = gradient
            self._pending, self._token_gradients = pending, felt

    def renew(self) -> None:
        """The module's class is another one: look again at how it is run."""
        self._model = PolicyModel(self.module, self.strategy.device.device, self.strategy.bf16)

    def head_used(self, options: PolicyOptions) -> str:
        """How log-probs come about: "chunked", or "plain" with the reason; "unknown" before the first pass."""
        return self._model.head_used(options.packing) if options.head != "plain" else "plain: asked for"

    def budget(self, options: PolicyOptions, chunked: bool) -> int:
        """Tokens of one micro-batch on one rank, with or without logits to hold."""
        return options.budget(self._model.vocab_size, self._model.token_bytes if chunked else None)

    # -- parts -----------------------------------------------------------------------------------------------

    def _prepare(self, batch: TrainBatch, options: PolicyOptions) -> tuple[list[np.ndarray], float]:
        """Check the batch, plan it, and return this rank's micro-batches and the temperature."""
        if len(batch) == 0:
            raise DataError("the batch has no sequences; nothing can be computed.")
        self._model.check_tokens(batch)
        temperature = batch.temperature if options.temperature is None else options.temperature
        if temperature <= 0:
            raise DataError("the batch was sampled greedily (temperature 0); pass temperature=1.0 to score it.")
        with self._resharded_on_failure():
            if options.packing:
                self._model.prove_packing(batch)
            head = self._model.prove_head(batch, options.packing, options.head)
        chunked = all(self.strategy.control.gather(head is not None))
        plan = plan_micro_batches(batch.lengths, self.strategy.world_size, self.budget(options, chunked))
        steps = self.strategy.control.gather((batch.key, len(plan[0])))
        if any(other != steps[0] for other in steps):
            raise EngineError(f"the ranks were given different batches ({steps}); give each the whole batch.")
        return plan[self.strategy.rank], temperature

    def _join_pending(self, batch: TrainBatch, aggregation: Aggregation, whole_step: bool) -> tuple[_Pending, float]:
        """Extend the normaliser to this batch, rescaling waiting gradients; also this batch's share of the
        whole."""
        own = totals_of(batch)
        self._drop_stale()
        if self._pending is None:
            return _Pending(own, aggregation, whole_step), 1.0
        if self._pending.aggregation != aggregation:
            raise LossError(
                f"gradients of aggregation={self._pending.aggregation.mode!r} wait for a step; they cannot "
                f"be joined by {aggregation.mode!r}: call optim_step or zero_grad first."
            )
        whole = self._pending.totals.then(own)
        now = aggregation.divisor(whole)
        scale = aggregation.divisor(self._pending.totals) / now
        scale_gradients(self.module.parameters(), scale)
        for felt in self._token_gradients:
            felt.scale(scale)
        self._pending = None  # from here on a failure clears everything
        return _Pending(whole, aggregation, whole_step), aggregation.divisor(own) / now

    def _watch(self, options: PolicyOptions) -> TokenGradients | None:
        """What takes each token's gradients; in a whole step nobody could ask for them."""
        return None if options.whole_step else TokenGradients(self.strategy.backward_scale(self.module))

    def _plan(self, loss: Loss, batch: TrainBatch, options: PolicyOptions, clock: Clock) -> StepPlan:
        """What the loss says of the whole step, where it wants to see it first; collective."""
        if not getattr(loss, "needs_plan", False):
            return NO_PLAN
        with clock("plan"):
            control = self.strategy.control
            parts = control.gather(self.forward(batch, options))
            return control.together(  # type: ignore[no-any-return]
                "the loss's plan", lambda: plan_step(loss, batch, parts, options.old_logprobs)
            )

    def _own_verdict(self, failure: Exception | None = None) -> Verdict:
        if failure is not None:
            return Verdict.FAILED
        return Verdict.STOP if self._stop_requested() else Verdict.GO

    def _vote(self, own: Verdict, doing: str, clock: Clock, failure: Exception | None = None) -> None:
        """Go on only if all ranks do."""
        with clock("vote"):
            verdict = self.strategy.control.vote(own)
        if verdict is Verdict.FAILED:
            self.strategy.control.raise_together(doing, failure)
        if verdict is Verdict.STOP:
            kept = "" if doing == "forward" else ": gradients were cleared, parameters and optimizer are untouched"
            raise Stopped(f"{doing} stopped{kept}")

    @contextmanager
    def _resharded_on_failure(self) -> Iterator[None]:
        """Leave no gathered parameter behind an exception; gradients that wait for a step stay."""
        try:
            yield
        except BaseException:
            reshard(self.module)
            raise

    @contextmanager
    def _cleared_on_failure(self, random_state: Any = None) -> Iterator[None]:
        """Leave nothing half done behind an exception or a stop."""
        try:
            yield
        except BaseException:
            self.zero_grad()
            if random_state is not None:
                self.strategy.device.set_rng_state(random_state)
            raise


def _aggregation(loss: Loss, options: PolicyOptions) -> Aggregation:
    """The caller's choice, else the one the loss is meant for, else the token mean."""
    return Aggregation.of(options.aggregation or getattr(loss, "aggregation", None) or "token-mean")


def _check_reference(loss: Loss, batch: TrainBatch) -> None:
    if getattr(loss, "needs_reference", False) and batch.ref_logprobs is None:
        raise LossError(f"{loss!r} needs ref_logprobs and the batch has none; score it with a reference engine first.")


def _fill() -> TrainBatch:
    """What a rank without rows computes, so that its peers' collectives complete."""
    return as_batch([np.zeros(2, np.int32)])
