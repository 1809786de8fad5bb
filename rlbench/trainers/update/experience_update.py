"""A trainer's updates on a rank, one optimizer step from lists of micro-batches: what they share, and the policy's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.data.batches.batch import TrainBatch
from rlbench.data.joining import join_batches
from rlbench.data.record.metrics import NO_SIGNAL
from rlbench.errors import DataError, EngineError
from rlbench.rl import Aggregation, Loss, resolve
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.memory.offloading import holds_gradients
from rlbench.strategies.steps import StepResult
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.passes.balancing import check_balanced
from rlbench.trainers.passes.forward import DUMMY, as_batch
from rlbench.trainers.passes.loss_value import need_finite
from rlbench.trainers.passes.metrics import MetricSums
from rlbench.trainers.update.gradient_step import GradientStep, Pass, PendingStep
from rlbench.trainers.update.options import PolicyOptions
from rlbench.trainers.update.policy_pass import PolicyPass, balancing, slices

T = TypeVar("T")
Metrics = dict[str, float]
Text = TrainBatch | Sequence[Sequence[int]]
"""A micro-batch of pretraining text: demonstrations, of which the mask is trained, or token ids of whole sequences."""


class Update(ABC):
    """One optimizer step after another from lists of micro-batches; a subclass says what one of these computes.

    Args:
        model: trained; prepared by the strategy.
        optimizer: over its parameters, made by the strategy.
        scheduler: stepped with the optimizer; None: the rate stays.
        stop_requested: asked before each backward, and before the step.
    """

    name: str
    loss_name: str

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        strategy: StrategyBase,
        aggregation: str | Aggregation,
        stop_requested: Callable[[], bool],
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.strategy = model, optimizer, scheduler, strategy
        self.aggregation = Aggregation.of(aggregation)
        self.gradients = GradientStep(model, strategy, stop_requested, lambda: self.optimizer)
        self._doing = f"the {self.name}'s update"

    def step(self, micro_batches: Sequence[Experience], *texts: Any) -> Metrics:
        """Take one optimizer step on these sequences of all ranks: `accumulate`, then `finish`; collective."""
        self.strategy.need_optimizer(self.optimizer)
        self.accumulate(micro_batches, *texts)
        return self.finish()

    def accumulate(self, micro_batches: Sequence[Experience], *texts: Any) -> None:
        """Add the gradients of this rank's micro-batches, any number, to those that wait for the step; collective.

        After a refusal of the micro-batches themselves all is as before. After a failing loss or a stop gradients are
        gone, parameters and optimizer untouched, and the random state is that of before the call.
        """
        self._check_all(micro_batches)
        self._add(micro_batches)

    def finish(self) -> Metrics:
        """Clip and step with the gradients that wait; collective.

        A gradient norm that is not finite, or a step without a single trained token, leaves parameters, optimizer and
        scheduler as they are, on all ranks alike; `<name>_skipped` is 1 then. Returns metrics over all ranks and all
        calls of the step, and `<name>_lr`, `<name>_grad_norm` (before clipping), in float16 `<name>_loss_scale`.
        """
        if not self.waiting:
            raise EngineError(f"there is no gradient of the {self.name} to step with; call accumulate(…) first.")
        self.strategy.need_optimizer(self.optimizer)
        rate = float(self.optimizer.param_groups[0]["lr"])
        with self.gradients.cleared_on_failure():
            self._complete()
            metrics = self.so_far()
            self.gradients.vote("the optimizer step")
            done = self._stepped(metrics)
        self.gradients.forget()
        assert done["grad_norm"] is not None
        own = {"lr": rate, "grad_norm": done["grad_norm"], "skipped": float(not done["stepped"])}
        if "loss_scale" in done:
            own["loss_scale"] = done["loss_scale"]
        return metrics | {f"{self.name}_{name}": value for name, value in own.items()}

    def so_far(self) -> Metrics:
        """Metrics of what waits for its step, over all ranks; the loss is that of its sequences alone; collective."""
        own = MetricSums.joined(one for one in self.gradients.beside if isinstance(one, MetricSums))
        return self._named(MetricSums.joined(self._of_each(own)).result())

    def clear(self) -> None:
        """Drop the gradients that wait, and what is known of them."""
        self.gradients.clear()

    @property
    def waiting(self) -> bool:
        """Whether something was accumulated since the last step."""
        return self.gradients.pending is not None

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients lie on the model that wait for the rest of their step."""
        return self.gradients.pending is not None and holds_gradients(self.model)

    @property
    def lost_gradients(self) -> bool:
        """Whether somebody cleared the gradients that wait (`session.zero_grad()`, a cell of the user's)."""
        return self.gradients.lost

    def waiting_state(self) -> dict[str, Any]:
        """What is known of the step whose gradients wait; they themselves are the model's."""
        return {"pending": self.gradients.pending, "beside": self.gradients.beside}

    def restore_waiting(self, state: Mapping[str, Any]) -> None:
        """Go on with what `waiting_state` gave; the gradients are the caller's to put back."""
        self.gradients.pending, self.gradients.beside = state["pending"], list(state["beside"])

    @abstractmethod
    def _check(self, part: Experience) -> None:
        """Raise what keeps a micro-batch from being trained on."""

    @abstractmethod
    def _passes(self, parts: Sequence[Experience], pending: PendingStep, count: int) -> Callable[[int], Pass]:
        """What `GradientStep.run` takes; collective. Metrics are counted in what lies beside the gradients."""

    def _named(self, found: Metrics) -> Metrics:
        """The metrics of all ranks under the trainer's names; collective."""
        return {self.loss_name if name == "loss" else name: value for name, value in found.items()}

    def _complete(self) -> None:  # noqa: B027
        """Add what belongs to the step and is computed at its end; collective. Nothing, for most."""

    def _check_all(self, micro_batches: Sequence[Experience]) -> None:
        def check() -> None:
            for part in micro_batches:
                if len(part) == 0:
                    raise DataError("a micro-batch has no sequences; leave it out.")
                self._check(part)

        self.strategy.control.together(f"checking the {self.name}'s micro-batches", check)

    def _of_each(self, own: T) -> Sequence[T]:
        """Gather what ranks that see the same rows have in common, once of each such group; collective."""
        return self.strategy.rows.of_each(self.strategy.control.gather(own))

    def _add(self, own: Sequence[Experience]) -> None:
        parts, _ = self.strategy.rows.shared(own)
        if self.gradients.pending is None and self.strategy.forget_gradients(self.model):
            self.strategy.print(f"the {self.name} had gradients that are not of this step; they were dropped")
        with self.gradients.adding([part.batch for part in parts], self.aggregation) as pending:
            if pending.totals.tokens:
                count = max(self.strategy.control.gather(len(parts)))
                self.gradients.run(count, self._passes(parts, pending, count), self._doing)

    def _reason_to_skip(self, metrics: Metrics) -> str | None:
        """Say why the step that `metrics` tell of is left out; None: it is not."""
        assert self.gradients.pending is not None
        return None if self.gradients.pending.totals.tokens else "it has no trained token (the mask is False for all)"

    def _stepped(self, metrics: Metrics) -> StepResult:
        if (reason := self._reason_to_skip(metrics)) is None:
            return self.strategy.step_now(self.optimizer, self.model, self.scheduler)
        self.strategy.print(f"the {self.name}'s step skipped: {reason}")
        self.strategy.forget_gradients(self.model)
        return StepResult(stepped=False, grad_norm=0.0, skipped=reason)


@dataclass
class _Deferred:
    """What an `accumulate` left to `finish`: micro-batches of a loss that wants to see the whole step, and texts."""

    parts: list[Experience]
    texts: list[Text]

    def scale(self, factor: float) -> None:
        """Nothing of it is normalised yet."""


class PolicyUpdate(Update):
    """Optimizer steps of a policy. Where the experience has no old log-probs, the sampler's stand in.

    Args:
        loss: by name or as a value; may be replaced between steps. One with a plan (`high_entropy`, `clip_cov`, …)
            sees the whole step, so its passes all run in `finish`.
        packed: rows without padding; or padded ones. The result is the same.
        share_prompts, head, tile, temperature: see `PolicyOptions`.
        ptx_coef: weight of the language loss on pretraining text.
        no_signal: where all advantages of a step are 0 and it has no text: "step" all the same, or "skip".
        aux_loss_coef: see `PolicyOptions`.
    """

    name = "actor"
    loss_name = "policy_loss"

    def __init__(
        self,
        actor: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        strategy: StrategyBase,
        loss: str | Loss,
        aggregation: str | Aggregation = "seq-mean-token-mean",
        *,
        packed: bool = True,
        share_prompts: bool = False,
        head: str = "auto",
        tile: int | None = None,
        temperature: float | None = None,
        ptx_coef: float = 0.0,
        no_signal: str = "step",
        aux_loss_coef: float = 0.0,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(actor, optimizer, scheduler, strategy, aggregation, stop_requested)
        self.loss: Loss = resolve(loss)
        self.ptx_coef, self.no_signal = ptx_coef, no_signal
        given: dict[str, Any] = {"packing": packed, "head": head, "tile": tile, "temperature": temperature}
        given |= {"share_prompts": share_prompts, "aux_loss_coef": aux_loss_coef}
        self.options = PolicyOptions(**given, old_logprobs="sampler")
        check_balanced(actor, aux_loss_coef, strategy.sequence.size)
        self._policy = PolicyPass(self.gradients, strategy.router_replay)

    def accumulate(self, micro_batches: Sequence[Experience], pretraining: Sequence[Text] = ()) -> None:
        """See `Update.accumulate`. When the step ends, `ptx_coef` times the mean of -log p over all trained tokens of
        `pretraining`, of this rank (all but the first of each sequence of ids), over all ranks, joins the policy's
        loss."""
        self.strategy.control.together("checking the texts", lambda: self._check_texts(pretraining))
        self._check_all(micro_batches)
        planned = getattr(self.loss, "needs_plan", False)
        if not planned:
            self._add(micro_batches)
        self.gradients.beside.append(_Deferred(list(micro_batches) if planned else [], list(pretraining)))

    @property
    def head_used(self) -> str:
        """How log-probs come about: "chunked", or "plain" with the reason; "unknown" before the first pass."""
        return self._policy.head_used(self.options)

    @property
    def waiting(self) -> bool:
        """Whether something was accumulated since the last step."""
        return super().waiting or bool(self._deferred)

    @property
    def _deferred(self) -> list[_Deferred]:
        return [one for one in self.gradients.beside if isinstance(one, _Deferred)]

    def _check(self, part: Experience) -> None:
        self._policy.check(part.batch, self.options, self.loss)

    def _passes(self, parts: Sequence[Experience], pending: PendingStep, count: int) -> Callable[[int], Pass]:
        batches, plan = [part.batch for part in parts], {}
        mine = slices(batches)
        if getattr(self.loss, "needs_plan", False):
            joined = self._of_each(join_batches(batches, renumber=False) if batches else None)
            before = sum(len(batch) for batch in joined[: self.strategy.rows.number] if batch is not None)
            mine = slices(batches, before)
            whole = join_batches([batch for batch in joined if batch is not None], renumber=False)
            plan = self._policy.plan(self.loss, mine, count, whole, self.options)
        sums = MetricSums()
        for batch in batches:
            sums.mean("no_signal", batch.no_signal * len(batch), len(batch))
        self.gradients.beside.append(sums)
        padded = [*mine, *[None] * (count - len(mine))]
        return lambda index: self._policy.loss(padded[index], self.loss, pending, self.options, sums, plan)

    def _reason_to_skip(self, metrics: Metrics) -> str | None:
        if self.no_signal == "skip" and metrics.get("no_signal") == 1 and "ptx_loss" not in metrics:
            return NO_SIGNAL
        return super()._reason_to_skip(metrics)

    def _complete(self) -> None:
        texts = [text for one in self._deferred for text in one.texts]
        parts = [part for one in self._deferred for part in one.parts]
        if self.gradients.pending is None or any(self.strategy.control.gather(len(parts))):
            self._add(parts)
        assert self.gradients.pending is not None
        if self.gradients.pending.totals.tokens:
            self._train_on_texts([_as_rows(text) for text in texts])

    def _check_texts(self, texts: Sequence[Text]) -> None:
        if texts and self.ptx_coef == 0:
            raise DataError("pretraining text has no effect with ptx_coef=0; give a weight, or no text.")
        for text in texts:
            if not len(text) or (not isinstance(text, TrainBatch) and min(map(len, text)) < 2):
                raise DataError("a pretraining sequence has fewer than two tokens, so there is nothing to predict.")
            if not (batch := _as_rows(text)).mask.any():
                raise DataError("a micro-batch of pretraining text has no trained token: its mask is all False.")
            self._policy.model.check_tokens(batch)

    def _train_on_texts(self, own: Sequence[TrainBatch]) -> None:
        batches, _ = self.strategy.rows.shared(own)
        counted = self._of_each((len(batches), sum(int(batch.mask.sum()) for batch in batches)))
        tokens, sums = sum(count for _, count in counted), MetricSums()
        self.gradients.beside.append(sums)
        options = replace(self.options, temperature=1.0, share_prompts=False)

        @contextmanager
        def one(index: int) -> Iterator[tuple[Tensor, Callable[[], Tensor] | None]]:
            mine = batches[index] if index < len(batches) else None
            with self._policy.stats(mine or DUMMY, options, balance=options.aux_loss_coef > 0) as (found, inputs):
                logprobs = found.logprobs

                def compute() -> Tensor:
                    assert mine is not None
                    mask = torch.from_numpy(mine.mask).to(logprobs.device)
                    total = -torch.where(mask, logprobs, 0.0).sum()
                    need_finite("the language loss", total, logprobs, mask, "the weights")
                    sums.mean("ptx_loss", float(total.detach()), float(mask.sum()))
                    each = inputs.grid.pad(mask.float())
                    total = total + balancing(inputs, each, options.aux_loss_coef, sums)
                    return total * (self.ptx_coef / tokens)

                yield logprobs, None if mine is None else compute

        self.gradients.run(max(count for count, _ in counted), one, self._doing)


def _as_rows(text: Text) -> TrainBatch:
    return text if isinstance(text, TrainBatch) else as_batch([np.asarray(ids, np.int32) for ids in text])
