"""The gradients of one model that wait for an optimizer step: who adds to them, what normalises them, how a step ends.

The normaliser covers all that a step sees, so the gradient does not depend on how its sequences were split. The ranks
vote before every backward and before the step, so that a failing loss or a stop ends the call on all with nothing half
done. What fails inside a forward or a backward is not voted on: whoever drives the ranks ends the one that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import LossError, Stopped
from rlbench.rl import Aggregation, BatchTotals
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.memory.offloading import holds_gradients, reshard
from rlbench.strategies.optim.gradients import scale_waiting
from rlbench.trainers.passes.step_plan import prompts_of, totals_of
from rlbench.user_code import user_code

Pass = AbstractContextManager[tuple[Tensor, Callable[[], Tensor] | None]]
"""A forward. It gives a tensor that depends on the parameters, and what computes the loss (None: a dummy batch); the
backward runs inside of it."""


class Scaled(Protocol):
    """What belongs to gradients that wait, and is scaled as they are."""

    def scale(self, factor: float) -> None: ...


@dataclass(frozen=True)
class PendingStep:
    """How the tokens of a step are weighed whose gradients wait.

    `whole_step`: the optimizer's step follows at once; where its driver went away instead, the next pass drops it.
    `prompts`: where the aggregation weighs by prompt. `share`: of the whole that the last call's sequences are.
    """

    totals: BatchTotals
    aggregation: Aggregation
    whole_step: bool = False
    prompts: frozenset[tuple[int, int]] = frozenset()
    share: float = 1.0

    def weights(self, mask: Tensor, group: Tensor | None) -> Tensor:
        """(S, T) weights of a micro-batch's tokens."""
        return self.aggregation.weights(mask, self.totals, group)


class GradientStep:
    """Of one model on one rank; `optimizer` gives the one whose loss scale applies to a backward, or None."""

    def __init__(
        self,
        model: nn.Module,
        strategy: StrategyBase,
        stop_requested: Callable[[], bool],
        optimizer: Callable[[], Any] = lambda: None,
    ) -> None:
        self.model, self.strategy = model, strategy
        self._stop_requested, self._optimizer = stop_requested, optimizer
        self.pending: PendingStep | None = None
        self.beside: list[Scaled] = []  # of the calls of the step; forgotten with the gradients

    @contextmanager
    def adding(
        self, batches: Sequence[TrainBatch], aggregation: Aggregation, *, whole_step: bool = False, shared: bool = False
    ) -> Iterator[PendingStep]:
        """Around the passes over these sequences, whose gradients join those that wait; collective.

        Gradients that wait are scaled to the larger normaliser, so that calls in a row equal one call with everything.
        `batches` are this rank's, with a number of its own for each group of the run; `shared` ones are the whole
        call's, the same on all ranks, and number their groups as they like. After a failure gradients are gone,
        parameters and optimizer untouched, and the random state is that of before.
        """
        self.drop_stale()
        totals = BatchTotals.combine(map(totals_of, batches))
        prompts = frozenset[tuple[int, int]]()
        if aggregation.mode == "prompt-mean":
            prompts = prompts.union(*(prompts_of(batch, numbered_anew=shared) for batch in batches))
        if not shared:
            counted = self.strategy.rows.of_each(self.strategy.control.gather((totals, prompts)))
            totals, prompts = BatchTotals.combine(t for t, _ in counted), prompts.union(*(p for _, p in counted))
        if self.pending is not None and self.pending.aggregation != aggregation:
            raise LossError(
                f"gradients of aggregation={self.pending.aggregation.mode!r} wait for a step, and cannot be joined by "
                f"{aggregation.mode!r}: optim_step or zero_grad first."
            )
        if self.pending is not None and (split := self.pending.prompts & prompts):
            said = f"aggregation 'prompt-mean' and {len(split)} prompts with sequences in two calls of one step"
            raise LossError(f"{said}: give all sequences of a prompt to one call.")
        with self.cleared_on_failure():
            pending = self._joined(totals, aggregation, whole_step, prompts)
            yield pending
        self.pending = pending

    def run(
        self, count: int, passes: Callable[[int], Pass], doing: str, after: Callable[[int], None] = lambda index: None
    ) -> None:
        """Take `count` forwards and backwards, the same number on all ranks; `after` is called behind each."""
        for index in range(count):
            with passes(index) as (anchor, loss):
                total, failure = anchor.sum() * 0.0, None
                try:
                    total = total if loss is None else loss()
                except Exception as error:  # of a user's loss: the vote ends the call on all ranks
                    failure = error
                self.vote(doing, failure)
                with user_code():
                    self.strategy.backward(total, self.model, self._optimizer(), reduction="sum")
            del anchor, loss, total  # with what they hold: the next pass would begin beside the pixels of this one
            after(index)

    def vote(self, doing: str, failure: Exception | None = None, cleared: bool = True) -> None:
        """Go on only if all ranks do; collective. `cleared`: a stop leaves no gradient, as its message then says."""
        if self.strategy.control.stops(doing, failure, self._stop_requested()):
            left = ": gradients were cleared, parameters and optimizer are untouched" if cleared else ""
            raise Stopped(f"{doing} stopped{left}")

    @contextmanager
    def cleared_on_failure(self) -> Iterator[None]:
        """Leave nothing half done behind an exception or a stop."""
        random_state = self.strategy.device.rng_state()
        try:
            yield
        except BaseException:
            self.clear()
            self.strategy.device.set_rng_state(random_state)
            raise

    def clear(self) -> None:
        """Drop the gradients, whoever they are of, and what is known of them; parameters are shards again."""
        self.strategy.forget_gradients(self.model)
        self.forget()

    def forget(self) -> None:
        """Know of no gradient that waits."""
        self.pending, self.beside = None, []

    def drop_stale(self) -> None:
        """Drop those of a whole step whose second half never came, and what is known of those that somebody cleared."""
        if self.pending is not None and (self.pending.whole_step or self.lost):
            self.clear()

    @property
    def lost(self) -> bool:
        """Whether somebody cleared the gradients that wait (`session.zero_grad()`, a cell of the user's)."""
        return self.pending is not None and self.pending.totals.tokens > 0 and not holds_gradients(self.model)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put away the gradients that wait; they come back as they were, bit for bit, whatever happens inside."""
        self.drop_stale()
        reshard(self.model)  # a gathered parameter does not show the gradient of its shard
        gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        pending, beside = self.pending, self.beside
        self.model.zero_grad(set_to_none=True)  # the strategy's count of them stays
        self.forget()
        try:
            yield
        finally:
            reshard(self.model)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self.pending, self.beside = pending, beside

    def _joined(
        self, own: BatchTotals, aggregation: Aggregation, whole_step: bool, prompts: frozenset[tuple[int, int]]
    ) -> PendingStep:
        """Extend the normaliser to these sequences, and scale what waits to it."""
        if self.pending is None:
            return PendingStep(own, aggregation, whole_step, prompts)
        before = self.pending.totals
        whole = before.then(own)
        divisor = aggregation.divisor(whole)
        if before.tokens:
            factor = aggregation.divisor(before) / divisor
            scale_waiting(self.model, factor)
            for one in self.beside:
                one.scale(factor)
        share = aggregation.divisor(own) / divisor if own.tokens else 1.0
        return PendingStep(whole, aggregation, whole_step, self.pending.prompts | prompts, share)
