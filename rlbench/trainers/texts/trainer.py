"""`SPMDTextTrainer`: one optimizer step after another on demonstrations, pairs or judged responses.

A step is what `session.train_step(texts.take(n), loss)` is: `PolicyStep` over the whole batch, which every rank has.
Every method is collective: all ranks call it, with the same arguments, and get the same numbers back.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
from torch import nn

from rlbench.data import TextStream, TrainBatch
from rlbench.data.base.ragged import rows_in_order
from rlbench.data.joining import spread
from rlbench.dispatch import context
from rlbench.errors import DataError, StateError
from rlbench.options import OptionError
from rlbench.rl import Aggregation, Loss, resolve
from rlbench.rl.types import needs_of
from rlbench.strategies.fsdp2 import FSDPV2Strategy
from rlbench.trainers.models.policy_module import BasePolicy, recompute_activations
from rlbench.trainers.options.text_config import TextOptions
from rlbench.trainers.passes.balancing import check_balanced
from rlbench.trainers.texts.held_out import metrics_of
from rlbench.trainers.texts.state import TextCheckpoints
from rlbench.trainers.update.options import PolicyOptions
from rlbench.trainers.update.policy_step import PolicyStep
from rlbench.trainers.update.stateful_loss import with_state

Metrics = dict[str, Any]


class SPMDTextTrainer:
    """Trains a policy on texts, `train_batch_size` of them (of pairs: pairs) to an optimizer step.

    Args:
        strategy: of the rank; no inference engine is needed.
        actor: the policy, sharded by the strategy (or the session's own module).
        actor_optim: its optimizer.
        loss: a name, a value of `rlbench.rl` or a function; also one that is pickled already.
        texts: a batch (`rb.data.demonstrations`, `pairs`, `labelled`), shuffled by the strategy's seed, or a stream of
            one: the trainer owns its place.
        actor_scheduler: stepped with the optimizer; None: the rate stays.
        reference: the frozen policy of a loss that compares with one: a prepared module, `BasePolicy` (the actor with
            its adapters off), or one that the session holds.
        eval_texts: a batch that is held out, for `evaluate` and `eval_steps`.
        tokenizer: saved beside a model (`save_hf_ckpt`).
        options: of `TextConfig` and `LoopOptions`, and those of `StrategyConfig` that act on texts, by name.
    """

    critic = critic_optim = ema_model = reward_model = policy_update = None  # what trainers of experience hold, too
    updates: tuple[()] = ()
    experience_waits = False
    samples = False
    """Whether it draws from the session's replicas, and brings them its weights."""

    def __init__(
        self,
        strategy: FSDPV2Strategy,
        actor: nn.Module,
        actor_optim: Any,
        loss: str | Loss | bytes,
        texts: TrainBatch | TextStream,
        *,
        actor_scheduler: Any = None,
        reference: Any = None,
        eval_texts: TrainBatch | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        self.options = TextOptions.read(strategy.config, options)
        self.strategy, self.tokenizer, self.initial_model = strategy, tokenizer, reference
        self.actor, self.actor_optim, self.actor_scheduler = actor, actor_optim, actor_scheduler
        self.loss = loss if isinstance(loss, bytes) else cloudpickle.dumps(resolve(loss))
        self.texts = texts if isinstance(texts, TextStream) else texts.stream(seed=strategy.seed)
        self.eval_texts = eval_texts
        config, loop = self.options.strategy, self.options.loop
        if loop.eval_steps > 0 and eval_texts is None:
            raise OptionError("eval_steps has no effect without texts that are held out: give eval_data.")
        check_balanced(actor, loop.aux_loss_coef, strategy.sequence.size)
        self.passes = PolicyOptions(
            self.options.texts.token_budget,
            config.packing,
            head=config.head,
            whole_step=True,
            share_prompts=config.share_prompts,
            aux_loss_coef=loop.aux_loss_coef,
        )
        self.policy = self._policy_step(actor, lambda: actor_optim)
        self._reference_step = self._policy_step(reference) if isinstance(reference, nn.Module) else None
        self.aggregation = Aggregation.of_loss(self._value)
        self.files = TextCheckpoints(self)
        self.iterations = self.optimizer_steps = 0
        self.shown: TrainBatch | None = None  # some of what was trained on last
        self.unsent = False  # a call that did not come to its end has changed the weights
        if loop.gradient_checkpointing:
            recompute_activations(actor, loop.gradient_checkpointing_use_reentrant)

    def iterate(self) -> Metrics:
        """One optimizer step on the next texts; saves and evaluates as the options say.

        A failure or a stop before the step leaves weights, optimizer and the place in the texts as they were.
        """
        begin, place = time.perf_counter(), self.texts.state()
        self.unsent = False
        try:
            batch = self._next()
            found = self.policy.forward_backward(self._compared(batch), self.loss, self.passes)
            stepped = self.policy.optim_step(self.actor_optim, self.actor_scheduler, whole_step=True)
        except BaseException:
            self.texts.restore(place)
            raise
        self.iterations += 1
        self.optimizer_steps += 1
        self.shown = spread([batch])
        self.unsent = bool(stepped["stepped"])
        metrics = found["metrics"] | stepped["metrics"] | self._told(batch, found)
        metrics |= {"skipped": stepped["skipped"], "train_steps": 1.0, "optimizer_steps": float(self.optimizer_steps)}
        metrics["perf/step_s"] = time.perf_counter() - begin
        self.files.save_if_due()
        every = self.options.loop.eval_steps
        if every > 0 and self.iterations % every == 0:
            metrics |= self.evaluate()
        self.unsent = False  # the call comes to its end: the session numbers the weights
        return metrics

    def evaluate(self, texts: TrainBatch | None = None) -> Metrics:
        """Return the loss and its metrics (of pairs the accuracy) on texts that are held out, without a gradient.

        `texts`: in the place of the trainer's `eval_texts`.
        """
        batch = self.eval_texts if texts is None else texts
        if batch is None:
            raise StateError("there is nothing to evaluate on: evaluate(texts), or eval_data= of the trainer")
        batch = self._compared(batch)
        if texts is None:
            self.eval_texts = batch  # the reference never changes
        control = self.strategy.control
        loss = with_state(self._value, self.policy.loss_states.held)
        scored = control.gather(self.policy.forward(batch, replace(self.passes, needs=needs_of(loss))))
        found = control.together("evaluating", lambda: metrics_of(loss, batch, scored, self.aggregation))
        return {f"eval/{name}": value for name, value in found.items()}

    def finish(self) -> None:
        """The run is over: what is kept at its end is written."""
        self.files.save_if_due(at_the_end=True)

    def send_weights(self) -> None:
        """Leave the replicas as they are: `session.sync_weights()` brings them the weights."""

    def went_elsewhere(self) -> None:
        """A checkpoint was loaded: the session has yet to number these weights."""
        self.unsent = True

    def drop_gradients(self) -> None:
        """Nothing waits between two iterations."""

    def waiting_state(self) -> dict[str, Any]:
        """Nothing waits between two iterations."""
        return {}

    def restore_waiting(self, state: dict[str, Any]) -> None:
        """Nothing waits between two iterations."""

    @property
    def _value(self) -> Loss:
        loaded: Loss = resolve(cloudpickle.loads(self.loss))
        return loaded

    def _policy_step(self, module: nn.Module, optimizer: Any = lambda: None) -> PolicyStep:
        def report(**progress: Any) -> None:
            context.current().report(**progress)

        return PolicyStep(module, self.strategy, lambda: context.current().stop_requested(), report, optimizer)

    def _next(self) -> TrainBatch:
        size = self.options.strategy.train_batch_size
        batch = self.texts.take(size)
        if not len(batch):
            raise DataError(f"the texts have ended, after {self.texts.taken}: a stream without epochs= goes on")
        return batch

    def _compared(self, batch: TrainBatch) -> TrainBatch:
        """Return a batch with the reference's log-probs, where the loss compares with one."""
        if self.initial_model is None or batch.ref_logprobs is not None:
            return batch
        control, options = self.strategy.control, self.passes
        if isinstance(self.initial_model, nn.Module | BasePolicy):
            step = self._reference_step or self.policy
            adapters = not isinstance(self.initial_model, BasePolicy)
            parts = control.gather(step.forward(batch, replace(options, adapters=adapters)))
            found = rows_in_order(parts)["logprobs"].values
        else:  # rank 0 asks for the whole batch, which all have
            mine = batch if control.rank == 0 else batch[:0]
            given = options.packing, options.head, options.share_prompts
            found = control.gather(self.initial_model.logprobs(mine, *given))[0]
        return batch.replace(ref_logprobs=np.asarray(found, np.float32))

    def _told(self, batch: TrainBatch, found: Metrics) -> Metrics:
        """What is known of the batch, and of how it was computed."""
        counted = self.strategy.control.gather([found[name] for name in ("padding", "computed", "shared")])
        padding, computed, saved = (sum(one) for one in zip(*counted, strict=True))
        lengths = batch.response_lengths
        return {
            **{name: found[name] for name in ("aggregation", "head", "micro_batches")},
            "padding": padding / max(1, computed),
            "shared": saved / max(1, computed - padding + saved),
            "sequences": len(batch),
            "length": float(lengths.mean()),
            "length_max": int(lengths.max()),
            "epoch": self.texts.taken / len(self.texts),
        }
