"""The updates of a trainer on a rank: the policy's and the critic's, one optimizer step from lists of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.data.batch import TrainBatch
from rlbench.errors import DataError, LossError
from rlbench.rl import Aggregation, Loss, RunningMoments, resolve, value_loss
from rlbench.rl.losses import check_sampled_as_trained
from rlbench.strategies.base import StrategyBase
from rlbench.trainers.experience import Experience, joined_batches
from rlbench.trainers.forward import PolicyModel, as_batch
from rlbench.trainers.loss_choice import loss_of
from rlbench.trainers.loss_value import evaluate
from rlbench.trainers.metrics import measure
from rlbench.trainers.micro_batch import loss_inputs
from rlbench.trainers.options import PolicyOptions
from rlbench.trainers.packing import ModelInputs
from rlbench.trainers.step_plan import StepPlan, plan_step
from rlbench.trainers.token_keeper import TokenKeeper
from rlbench.trainers.update_loop import Metrics, UpdateLoop, Weighing, fill, never
from rlbench.trainers.value_model import valued

__all__ = ["PolicyUpdate", "ValueUpdate", "loss_of"]

Text = Sequence[Sequence[int]]
"""A micro-batch of pretraining text: token ids of its sequences."""

STAND_IN = PolicyOptions(old_logprobs="sampler")
NAMES = {"loss": "policy_loss", "kl": "approx_kl", "experience_kl": "kl"}
"""What the trainer calls the standard metrics of a policy step."""


class PolicyUpdate(UpdateLoop):
    """Optimizer steps of a policy; see `UpdateLoop` for `step`, `accumulate` and `finish`.

    Where the experience has no old log-probs (`old_logprobs="sampler"`), the sampler's stand in.

    Metrics: `policy_loss`, `kl` (the experience's estimate to the reference, mean over the trained tokens), `ref_kl`
    (k3 to the reference, now), `approx_kl` (k3 of old to current policy), `entropy`, `logprob_gap`, `mismatch/…`,
    those of the loss (`ratio`, `clip_fraction`, …), `ptx_loss`, `tokens`, `actor_lr`, `actor_grad_norm`,
    `actor_skipped`.

    Args:
        actor: gives logits; prepared by the strategy.
        optimizer, scheduler, strategy, aggregation, stop_requested: see `UpdateLoop`.
        loss: by name or as a value; may be replaced between steps. One with a plan (`high_entropy`, `clip_cov`, …)
            sees the whole step, so its passes all run in `finish`.
        packed: rows without padding; or padded ones. The result is the same.
        head: see `PolicyOptions`: "chunked" never holds the logits, "plain" does, "auto" chooses.
        tile: rows of the output layer that are computed at once, where it is chunked; None: what suits the device.
        temperature: divides the logits; None: that of each batch.
        ptx_coef: weight of the language loss on pretraining text.
    """

    name = "actor"
    OF_STEP = (*UpdateLoop.OF_STEP, "_held", "_texts")

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
        head: str = "auto",
        tile: int | None = None,
        temperature: float | None = None,
        ptx_coef: float = 0.0,
        stop_requested: Callable[[], bool] = never,
    ) -> None:
        super().__init__(actor, optimizer, scheduler, strategy, aggregation, stop_requested)
        checked = PolicyOptions(packing=packed, head=head, temperature=temperature)
        self.loss: Loss = resolve(loss)
        self.ptx_coef = ptx_coef
        self._packed, self._head, self._tile, self._temperature = packed, checked.head, tile, temperature
        self._policy = PolicyModel(actor, strategy.device.device, strategy.bf16)

    # -- verbs -------------------------------------------------------------------------------------------------------

    def step(self, micro_batches: Sequence[Experience], pretraining: Sequence[Text] = ()) -> Metrics:
        """One optimizer step on these sequences and texts of all ranks; collective."""
        self.strategy.need_optimizer(self.optimizer)
        self.accumulate(micro_batches, pretraining)
        return self.finish()

    def accumulate(self, micro_batches: Sequence[Experience], pretraining: Sequence[Text] = ()) -> None:
        """See `UpdateLoop.accumulate`.

        Args:
            pretraining: of this rank, any number of micro-batches. `ptx_coef` times the mean of -log p over all their
                tokens, the first of each sequence aside, over all ranks, joins the policy's loss when the step ends.
        """
        self.strategy.control.together("checking the texts", lambda: self._check_texts(pretraining))
        super().accumulate(micro_batches)
        self._texts.extend(pretraining)

    @property
    def head_used(self) -> str:
        """How log-probs come about: "chunked", or "plain" with the reason; "unknown" before the first pass."""
        return self._policy.head_used(self._packed) if self._head != "plain" else "plain: asked for"

    # -- what the loop asks --------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        super()._forget()
        self._held: list[Experience] = []  # of a loss with a plan
        self._texts: list[Text] = []

    def _check(self, part: Experience) -> None:
        batch, loss = part.batch, self.loss
        self._policy.check_tokens(batch)
        if self._temperature is None and batch.temperature <= 0:
            raise DataError("the experience was sampled greedily (temperature 0); give temperature=1.0 to train on it.")
        if getattr(loss, "needs_reference", False) and batch.ref_logprobs is None:
            raise LossError(f"{loss!r} needs ref_logprobs and the experience has none; make it with an initial_model.")
        check_sampled_as_trained(loss, repr(loss), batch.reshaped_by)
        corrected = getattr(loss, "mismatch", None) is not None
        if corrected and batch.old_logprobs is None:
            raise LossError(
                f"{loss!r} corrects for the sampler, and the experience has no old_logprobs to compare its own with: "
                "use old_logprobs='recompute'."
            )

    @contextmanager
    def _forward(self, batch: TrainBatch, temperature: float | None = None) -> Iterator[tuple[Any, ...]]:
        if self._packed:
            self._policy.prove_packing(batch)
        chosen = temperature or self._temperature or batch.temperature
        with self._policy.stats(batch, chosen, self._packed, self._head, chunk_rows=self._tile) as found:
            yield found

    def _loss(self, part: Experience, found: tuple[Any, ...], weighing: Weighing, channels: Any) -> Tensor:
        logprobs, entropy, inputs = found
        view = loss_inputs(part.batch, logprobs, entropy, inputs, STAND_IN)
        if channels is not None:
            view = replace(view, channels=channels(view.mask))
        assert view.group is not None
        total, own = evaluate(self.loss, view, weighing.of(view.mask, view.group))
        before = self._sums.mismatch
        measure(self._sums, view, own, float(total.detach()))
        if part.batch.old_logprobs is None:
            self._sums.mismatch = before  # of the sampler with itself
        if part.kl is not None:
            kept = part.kl[part.batch.mask]
            self._sums.mean("experience_kl", float(kept.sum(dtype=np.float64)), len(kept))
        return total

    @property
    def _backward_at_once(self) -> bool:
        return not getattr(self.loss, "needs_plan", False)

    def _run(self, micro_batches: Sequence[Experience], weighing: Weighing) -> None:
        if self._backward_at_once:
            super()._run(micro_batches, weighing)
        else:
            self._held.extend(micro_batches)

    def _finish_gradients(self) -> None:
        assert self._weighing is not None
        if any(self.strategy.control.gather(len(self._held))):
            self._run_all(self._held, self._weighing, self._plan())
        self._train_on_texts()

    def _named(self, found: Metrics) -> Metrics:
        return {NAMES.get(name, name): value for name, value in found.items()}

    # -- a loss that wants to see the whole step ---------------------------------------------------------------------

    def _plan(self) -> list[Callable[[Tensor], dict[str, Tensor]]]:
        """What gives each of this rank's micro-batches its part of the loss's plan; collective."""
        control = self.strategy.control
        counts = control.gather(sum(len(part) for part in self._held))
        first = sum(counts[: self.strategy.rank])
        ends = first + np.cumsum([len(part) for part in self._held], dtype=np.int64)
        rows = [np.arange(end - len(part), end) for part, end in zip(self._held, ends, strict=True)]
        channels = control.gather(self._scored(rows))
        own = joined_batches([part.batch for part in self._held]) if self._held else None
        whole = [batch for batch in control.gather(own) if batch is not None]
        plan: StepPlan = control.together(
            "the loss's plan", lambda: plan_step(self.loss, joined_batches(whole), channels, STAND_IN.old_logprobs)
        )
        return [lambda mask, own=own: plan.of(own, mask) for own in rows]  # type: ignore[misc]

    @torch.no_grad()
    def _scored(self, rows: list[np.ndarray]) -> dict[str, Any]:
        """Log-probs and entropies of this rank's held sequences, by their rows in the step."""
        kept = TokenKeeper("logprobs", "entropy")
        for index in range(max(self.strategy.control.gather(len(rows)))):
            part = self._held[index].batch if index < len(rows) else fill()
            with self._forward(part) as (logprobs, entropy, _):
                if index < len(rows):
                    kept.add(rows[index], part, {"logprobs": logprobs, "entropy": entropy})
            self._vote("the pass before the loss's plan")
        return kept.result()

    # -- pretraining text ---------------------------------------------------------------------------------------------

    def _check_texts(self, texts: Sequence[Text]) -> None:
        if texts and self.ptx_coef == 0:
            raise DataError("pretraining text has no effect with ptx_coef=0; give a weight, or no text.")
        for text in texts:
            short = [row for row, ids in enumerate(text) if len(ids) < 2]
            if short or not len(text):
                raise DataError("a pretraining sequence has fewer than two tokens, so there is nothing to predict.")
            self._policy.check_tokens(_as_rows(text))

    def _train_on_texts(self) -> None:
        batches = [_as_rows(text) for text in self._texts]
        found = self.strategy.control.gather((len(batches), sum(batch.tokens for batch in batches)))
        tokens = sum(count for _, count in found)
        for index in range(max(count for count, _ in found)):
            mine = batches[index] if index < len(batches) else None
            with ExitStack() as within:
                logprobs = within.enter_context(self._forward(fill() if mine is None else mine, temperature=1.0))[0]
                loss, failure = (logprobs.sum() * 0.0 if mine is None else -logprobs.sum()), None
                if not torch.isfinite(loss):
                    failure = LossError(f"the language loss is {float(loss.detach())}.")
                elif mine is not None:
                    self._sums.mean("ptx_loss", float(loss.detach()), mine.tokens)
                self._backward(loss * (self.ptx_coef / tokens), failure)


def _as_rows(text: Text) -> TrainBatch:
    return as_batch([np.asarray(ids, np.int32) for ids in text])


class ValueUpdate(UpdateLoop):
    """Optimizer steps of a critic; see `UpdateLoop` for `step`, `accumulate` and `finish`.

    Metrics: `critic_loss`, `values` and `returns` (means over the trained tokens, before the step),
    `value_clip_fraction`, `explained_variance`, `critic_lr`, `critic_grad_norm`, `critic_skipped`.

    Args:
        critic: see `make_critic`, or one of the user's own (`own_critic`); prepared by the strategy.
        optimizer, scheduler, strategy, aggregation, stop_requested: see `UpdateLoop`.
        value_clip: bound on the change of a value since the experience was made, in units of the return; 0: none.
        packed: rows without padding; or padded ones. The result is the same.
    """

    name = "critic"
    OF_STEP = (*UpdateLoop.OF_STEP, "_errors", "_returns")

    def __init__(
        self,
        critic: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        strategy: StrategyBase,
        value_clip: float | None = None,
        aggregation: str | Aggregation = "seq-mean-token-mean",
        *,
        packed: bool = True,
        stop_requested: Callable[[], bool] = never,
    ) -> None:
        super().__init__(critic, optimizer, scheduler, strategy, aggregation, stop_requested)
        self.critic = critic
        self.value_clip = value_clip or None
        self._packed = packed

    def _forget(self) -> None:
        super()._forget()
        self._errors, self._returns = RunningMoments(), RunningMoments()

    def _check(self, part: Experience) -> None:
        if part.returns is None:
            raise DataError("the experience has no returns for the critic to predict; make it with a critic.")
        if self.value_clip is not None and part.values is None:
            raise DataError(f"value_clip={self.value_clip:g} needs the values of when the experience was made.")
        config = getattr(self.critic, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            return  # a module of the user's own, which says of no vocabulary
        size = int(config.get_text_config().vocab_size)
        for ids in (part.batch.prompts.values, part.batch.responses.values):
            if len(ids) and not (0 <= int(ids.min()) and int(ids.max()) < size):
                raise DataError(
                    f"the experience holds token ids from {ids.min()} to {ids.max()}, the critic's vocabulary has "
                    f"{size}; make the critic from a checkpoint with the actor's tokenizer."
                )

    @contextmanager
    def _forward(self, batch: TrainBatch) -> Iterator[tuple[Any, ...]]:
        with valued(self.critic, batch, self.strategy.device.device, self._packed) as found:
            yield found

    def _loss(self, part: Experience, found: tuple[Any, ...], weighing: Weighing, channels: Any) -> Tensor:
        values, inputs = found
        assert part.returns is not None
        mask = _padded(part.batch.mask, values, inputs) > 0
        returns = _padded(part.returns, values, inputs)
        old = None if part.values is None else _padded(part.values, values, inputs)
        group = torch.from_numpy(part.batch.group.astype(np.int64)).to(values.device)
        now = inputs.grid.pad(values)
        per_token, clipped = value_loss(now, returns, mask, old, self.value_clip)
        total = (per_token * weighing.of(mask, group)).sum()
        if not torch.isfinite(total):
            bad = int((~torch.isfinite(per_token) & mask).sum())
            raise LossError(
                f"the critic's loss is {float(total.detach())}: {bad} of {int(mask.sum())} trained tokens are not "
                "finite; look at the returns, and at the rewards they came from. No step was taken."
            )
        self._count(now.detach(), returns, mask, clipped, float(total.detach()))
        return total

    def _count(self, values: Tensor, returns: Tensor, mask: Tensor, clipped: dict[str, Any], loss: float) -> None:
        tokens = int(mask.sum())
        self._sums.totals["loss"] = self._sums.totals.get("loss", 0.0) + loss
        for name, numbers in {"values": values, "returns": returns, **clipped}.items():
            self._sums.mean(name, float(numbers[mask].double().sum()), tokens)
        self._errors = self._errors.update((returns - values).double(), mask)
        self._returns = self._returns.update(returns.double(), mask)

    def _named(self, found: Metrics) -> Metrics:
        errors, returns = RunningMoments(), RunningMoments()
        for theirs in self.strategy.control.gather((self._errors, self._returns)):
            errors, returns = errors.merge(theirs[0]), returns.merge(theirs[1])
        if returns.count:
            found = {**found, "explained_variance": _explained(errors, returns)}
        return {"critic_loss" if name == "loss" else name: value for name, value in found.items()}


def _padded(values: np.ndarray, like: Tensor, inputs: ModelInputs) -> Tensor:
    return inputs.grid.pad(torch.from_numpy(np.array(values, np.float32)).to(like.device))


def _explained(errors: RunningMoments, returns: RunningMoments) -> float:
    """`rlbench.rl.explained_variance` from moments: of equal returns, rounding may leave a little variance."""
    square = returns.squares + returns.count * returns.mean**2
    return 0.0 if returns.squares <= 1e-24 * square else 1.0 - errors.squares / returns.squares
