"""One optimizer step over the micro-batches of all ranks: what the policy's update and the critic's share.

The normaliser is counted first, over everything a step sees: all micro-batches, all ranks, all `accumulate` calls since
the last step. So the gradient does not depend on how the sequences were split. Ranks may have different numbers of
micro-batches: one that has none left computes an empty one, whose gradient is 0. Before every backward the ranks vote,
so that a failure or a stop on one ends the call on all, with nothing half done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.data.batch import TrainBatch
from rlbench.errors import DataError, EngineError, LossError, Stopped
from rlbench.rl import Aggregation, BatchTotals
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.control import Verdict
from rlbench.strategies.gradients import scale_gradients
from rlbench.strategies.memory_side import holds_gradients
from rlbench.trainers.experience import Experience
from rlbench.trainers.forward import as_batch
from rlbench.trainers.metrics import MetricSums, merged
from rlbench.trainers.micro_batch import totals_of
from rlbench.user_code import user_code

Metrics = dict[str, float]


def never() -> bool:
    """Nobody asks to stop."""
    return False


@dataclass(frozen=True)
class Weighing:
    """How the tokens of a step are weighed: its totals so far, and the aggregation."""

    totals: BatchTotals
    aggregation: Aggregation

    def of(self, mask: Tensor, group: Tensor) -> Tensor:
        """(S, T) weights of a micro-batch's tokens."""
        return self.aggregation.weights(mask, self.totals, group)


class UpdateLoop(ABC):
    """Base of the updates; a subclass says what one micro-batch computes (`_forward`) and what its loss is (`_loss`).

    Args:
        model: trained; prepared by the strategy.
        optimizer: over its parameters, made by the strategy.
        scheduler: stepped with the optimizer; None: the rate stays.
        strategy: the rank's.
        aggregation: how tokens become one number, by name or as a value.
        stop_requested: asked before each backward, and before the step.
    """

    name: str
    OF_STEP: tuple[str, ...] = ("_weighing", "_sums")
    """What is known of the step whose gradients wait."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        strategy: StrategyBase,
        aggregation: str | Aggregation,
        stop_requested: Callable[[], bool] = never,
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.strategy = model, optimizer, scheduler, strategy
        self.aggregation = Aggregation.of(aggregation)
        self._stop_requested = stop_requested
        self._weighing: Weighing | None = None
        self._forget()

    # -- verbs -------------------------------------------------------------------------------------------------------

    def step(self, micro_batches: Sequence[Experience]) -> Metrics:
        """One optimizer step on these sequences of all ranks; collective. `accumulate`, then `finish`."""
        self.strategy.need_optimizer(self.optimizer)
        self.accumulate(micro_batches)
        return self.finish()

    def accumulate(self, micro_batches: Sequence[Experience]) -> None:
        """Add the gradients of these sequences to those that wait for the step; collective.

        Gradients that wait are scaled to the larger normaliser, so that calls in a row equal one call with everything.

        Args:
            micro_batches: of this rank, each taken through one backward; any number, none too.

        Raises:
            DataError, LossError: a micro-batch that cannot be trained on, or a loss that fails or is not finite, on
                some rank. Stopped: somebody asked to stop. After a refusal of the micro-batches themselves all is as
                before; after anything later gradients are gone, parameters and optimizer untouched, and the random
                state is that of before the call.
        """
        control = self.strategy.control
        own = control.together(f"checking the {self.name}'s micro-batches", lambda: self._counted(micro_batches))
        whole = BatchTotals.combine(control.gather(own))
        self._refuse_joining(whole)
        random_state = self.strategy.device.rng_state()
        with self._cleared_on_failure(random_state):
            weighing = self._join(whole)
            if whole.tokens:
                self._run(micro_batches, weighing)
            self._weighing = weighing

    def finish(self) -> Metrics:
        """Clip and step with the gradients that wait; collective.

        A gradient norm that is not finite, or a step without a single trained token, leaves parameters, optimizer and
        scheduler as they are, on all ranks alike; `<name>_skipped` is 1 then.

        Returns:
            Metrics over all ranks and all calls of the step, equal on each rank, and `<name>_lr`, `<name>_grad_norm`
            (before clipping), `<name>_skipped`.

        Raises:
            EngineError: nothing waits. StateError: the optimizer is offloaded (the gradients wait on). Stopped:
                gradients are cleared, nothing was stepped.
        """
        if self._weighing is None:
            raise EngineError(f"there is no gradient of the {self.name} to step with; call accumulate(…) first.")
        self.strategy.need_optimizer(self.optimizer)
        rate = float(self.optimizer.param_groups[0]["lr"])
        with self._cleared_on_failure(self.strategy.device.rng_state()):
            if self._weighing.totals.tokens:
                self._finish_gradients()
            metrics = self._named(merged(self.strategy.control.gather(self._sums)))
            self._vote("the optimizer step")
            norm, stepped = self._stepped()
        self._forget()
        own = {"lr": rate, "grad_norm": norm, "skipped": float(not stepped)}
        return metrics | {f"{self.name}_{name}": value for name, value in own.items()}

    def so_far(self) -> Metrics:
        """Metrics of what waits for its step, over all ranks; the loss is that of its sequences alone; collective."""
        return self._named(merged(self.strategy.control.gather(self._sums)))

    def clear(self) -> None:
        """Forget the gradients that wait, and what is known of them."""
        self.strategy.forget_gradients(self.model)
        self._forget()

    @property
    def waiting(self) -> bool:
        """Whether something was accumulated since the last step."""
        return self._weighing is not None

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients lie on the model that wait for the rest of their step."""
        return self.waiting and self._backward_at_once and holds_gradients(self.model)

    @property
    def lost_gradients(self) -> bool:
        """Whether somebody cleared the gradients that wait (`session.zero_grad()`, a cell of the user's)."""
        waited = self._weighing is not None and self._weighing.totals.tokens > 0 and self._backward_at_once
        return waited and not holds_gradients(self.model)

    def waiting_state(self) -> dict[str, Any]:
        """What is known of the step whose gradients wait; they themselves are the model's."""
        return {name: getattr(self, name) for name in self.OF_STEP}

    def restore_waiting(self, state: Mapping[str, Any]) -> None:
        """Go on with what `waiting_state` gave; the gradients are the caller's to put back."""
        for name in self.OF_STEP:
            setattr(self, name, state[name])

    # -- what a subclass says --------------------------------------------------------------------------------------

    @abstractmethod
    def _check(self, part: Experience) -> None:
        """Raise what keeps a micro-batch from being trained on."""

    @abstractmethod
    def _forward(self, batch: TrainBatch) -> AbstractContextManager[tuple[Tensor, ...]]:
        """A forward; the backward runs inside the context. The first tensor depends on the parameters."""

    @abstractmethod
    def _loss(self, part: Experience, found: tuple[Any, ...], weighing: Weighing, channels: Any) -> Tensor:
        """This micro-batch's term of the step's loss; counts its metrics."""

    def _run(self, micro_batches: Sequence[Experience], weighing: Weighing) -> None:
        self._run_all(micro_batches, weighing, [None] * len(micro_batches))

    def _finish_gradients(self) -> None:  # noqa: B027
        """What belongs to the step and is computed at its end; nothing, for most."""

    @abstractmethod
    def _named(self, found: Metrics) -> Metrics:
        """The metrics of all ranks under the trainer's names; collective."""

    # -- parts -----------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._weighing = None
        self._sums = MetricSums()

    def _counted(self, micro_batches: Sequence[Experience]) -> BatchTotals:
        for part in micro_batches:
            if len(part) == 0:
                raise DataError("a micro-batch has no sequences; leave it out.")
            if (part.batch.prompts.lengths < 1).any():
                raise DataError("a sequence has an empty prompt; its first token would be predicted from nothing.")
            self._check(part)
        return BatchTotals.combine(totals_of(part.batch) for part in micro_batches)

    def _refuse_joining(self, own: BatchTotals) -> None:
        """Raise where these sequences cannot be weighed together with those that wait; alike on all ranks."""
        if self._weighing is None:
            return
        if self._weighing.aggregation != self.aggregation:
            raise LossError(
                f"gradients of aggregation={self._weighing.aggregation.mode!r} wait for a step; they cannot be joined "
                f"by {self.aggregation.mode!r}: finish() or clear() first."
            )
        both = self._weighing.totals.prompt_tokens.keys() & own.prompt_tokens.keys()
        if both and self.aggregation.mode == "prompt-mean":
            raise LossError(
                f"aggregation 'prompt-mean' and {len(both)} prompts with sequences in two calls of one optimizer step: "
                "give all sequences of a prompt to one call."
            )

    @property
    def _backward_at_once(self) -> bool:
        """Whether `accumulate` leaves gradients, not work for `finish`."""
        return True

    def _join(self, own: BatchTotals) -> Weighing:
        """Extend the normaliser to these sequences, and scale what waits to it."""
        if self.lost_gradients:
            self.strategy.print(f"the {self.name}'s gradients that waited are gone; the step begins anew")
            self._forget()
        if self._weighing is None:
            if self.strategy.forget_gradients(self.model):
                self.strategy.print(f"the {self.name} had gradients that are not of this step; they were dropped")
            return Weighing(own, self.aggregation)
        before = self._weighing.totals
        whole = BatchTotals.combine([before, own])
        if before.tokens:
            factor = self.aggregation.divisor(before) / self.aggregation.divisor(whole)
            scale_gradients(self.model.parameters(), factor)
            self._sums.totals = {n: v * factor if n == "loss" else v for n, v in self._sums.totals.items()}
        return Weighing(whole, self.aggregation)

    def _run_all(self, parts: Sequence[Experience], weighing: Weighing, channels: Sequence[Any]) -> None:
        """As many backward passes as the rank with the most micro-batches has.

        A loss that fails on one rank is voted on. What fails inside a forward or a backward is not: the peers are in
        its collectives, and whoever drives the ranks ends the one that failed.
        """
        for index in range(max(self.strategy.control.gather(len(parts)))):
            part = parts[index] if index < len(parts) else None
            with ExitStack() as within:
                found = within.enter_context(self._forward(fill() if part is None else part.batch))
                total, failure = found[0].sum() * 0.0, None
                try:
                    if part is not None:
                        total = self._loss(part, found, weighing, channels[index])
                except Exception as error:  # of a user's loss: the vote ends the call on all ranks
                    failure = error
                self._backward(total, failure)

    def _backward(self, total: Tensor, failure: Exception | None) -> None:
        """Vote, then go backward."""
        self._vote(f"the {self.name}'s update", failure)
        with user_code():
            self.strategy.backward(total, self.model, self.optimizer, reduction="sum")

    def _vote(self, doing: str, failure: Exception | None = None) -> None:
        """Go on only if all ranks do."""
        own = Verdict.FAILED if failure else Verdict.STOP if self._stop_requested() else Verdict.GO
        verdict = self.strategy.control.vote(own)
        if verdict is Verdict.FAILED:
            self.strategy.control.raise_together(doing, failure)
        if verdict is Verdict.STOP:
            raise Stopped(f"{doing} stopped: gradients were cleared, parameters and optimizer are untouched")

    def _stepped(self) -> tuple[float, bool]:
        """Step, unless nothing was trained on; the norm, and whether it stepped."""
        assert self._weighing is not None
        if not self._weighing.totals.tokens:
            self.strategy.print(f"the {self.name}'s step skipped: it has no trained token (the mask is False for all)")
            self.strategy.forget_gradients(self.model)
            return 0.0, False
        result = self.strategy.step_now(self.optimizer, self.model, self.scheduler)
        norm = result["grad_norm"]
        assert norm is not None
        return norm, result["stepped"]

    @contextmanager
    def _cleared_on_failure(self, random_state: Any) -> Iterator[None]:
        """Leave nothing half done behind an exception or a stop."""
        try:
            yield
        except BaseException:
            self.clear()
            self.strategy.device.set_rng_state(random_state)
            raise


def fill() -> TrainBatch:
    """What a rank without a micro-batch computes, so that its peers' collectives complete."""
    return as_batch([np.zeros(2, np.int32)])
