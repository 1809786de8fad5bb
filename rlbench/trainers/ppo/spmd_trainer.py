"""`SPMDPPOTrainer`: every rank makes experience of its own share of the prompts and trains on its own micro-batches.

One `ppo_train` is `max_epochs` passes over the experience in its order, `train_batch_size` sequences (over all ranks)
to an optimizer step. What is left over where they do not divide waits, as gradients, for the next call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rlbench.dispatch import context
from rlbench.errors import StateError
from rlbench.options import OptionError, defaults
from rlbench.rl import AdaptiveKL, Aggregation, Loss, PolicyLoss, resolve
from rlbench.strategies.options.config import accumulation_steps
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.ppo.trainer import Metrics, PPOTrainer, mean_of
from rlbench.trainers.update.experience_update import PolicyUpdate
from rlbench.trainers.update.loss_choice import loss_of
from rlbench.trainers.update.value_update import ValueUpdate

OF_EXPERIENCE = ("_waiting", "_place", "_began", "_texts_began", "_done", "rollout_metrics")
"""What is known of the experience that is being trained on."""
OF_OUR_LOSS = ("entropy_coef", "high_entropy_token_ratio", "mismatch")
"""Options of the loss that the options make; one of your own brings its own."""


class SPMDPPOTrainerBase(PPOTrainer):
    """A `PPOTrainer` with its update.

    Args:
        args, kwargs: of `PPOTrainer`. A `micro_train_batch_size` beyond a rank's share of `train_batch_size` is that.
            `aggregation`: a `loss` of your own that says how it is meant has its own way where this is at its default.
        VLM: vision-language models, which are not here yet.

    Raises:
        AssertionError: `engine_tp_size` of the strategy is not above 0.
        OptionError: an option that cannot be honoured, or a batch the ranks cannot share.
    """

    def __init__(
        self,
        *args: Any,
        VLM: bool = False,
        **kwargs: Any,
    ) -> None:
        if VLM:
            raise OptionError("VLM=True: vision-language models are not here yet. Leave it out.")
        strategy = kwargs["strategy"] if "strategy" in kwargs else args[0]
        size = strategy.config.engine_tp_size
        assert size > 0, f"engine_tp_size={size}: the trainer needs an inference engine of at least one rank"
        super().__init__(*args, **kwargs)
        options, ppo = self.options.strategy, self.options.ppo
        whole, ranks = options.train_batch_size, self.strategy.world_size
        if whole % ranks or options.micro_train_batch_size < whole // ranks:  # else one backward takes a rank's share
            accumulation_steps(whole, options.micro_train_batch_size, ranks)
        self._per_rank = whole // ranks
        self.policy_loss: Loss
        self.policy_loss, self.aggregation = loss_of(options, ppo)
        if self.loss is not None:
            self.policy_loss = resolve(self.loss)
            self._check_own_loss(self.policy_loss)
            own = getattr(self.policy_loss, "aggregation", None)
            if own is not None and ppo.aggregation == defaults(PPOConfig)["aggregation"]:
                self.aggregation = Aggregation.of(own)
        self.policy_update = PolicyUpdate(
            self.actor,
            self.actor_optim,
            self.actor_scheduler,
            self.strategy,
            self.policy_loss,
            self.aggregation,
            packed=options.packing,
            head=options.head,
            tile=options.chunk_size if options.head == "chunked" else None,
            temperature=ppo.temperature,
            ptx_coef=ppo.ptx_coef,
            stop_requested=self._may_stop,
        )
        self.value_update = None
        if self.critic is not None and self.critic_optim is not None:
            self.value_update = ValueUpdate(
                self.critic,
                self.critic_optim,
                self.critic_scheduler,
                self.strategy,
                ppo.value_clip or None,
                self.aggregation,
                packed=options.packing,
                stop_requested=self._may_stop,
            )
        if ppo.freezing_actor_steps > 0 and self.value_update is None:
            raise OptionError(
                f"freezing_actor_steps={ppo.freezing_actor_steps}: without a critic nothing would train meanwhile. "
                "Give a critic, or leave it out."
            )
        self._waiting = 0  # sequences of this rank whose gradients wait for their step
        self._place = 0  # sequences of this rank trained on in a call that was stopped
        self._began = 0  # the place at which the step that waits began, in this experience
        self._committed = False  # the actor has stepped: the critic does too, whoever asks to stop
        self._texts_began: Any = None  # and its place in the pretraining texts
        self._done: list[Metrics] = []  # of the optimizer steps on this experience
        self._said = False

    def ppo_train(self, global_steps: int = 0) -> Metrics:
        """Train on the experience in the buffer, then give the inference engine the new weights.

        A call that was stopped leaves the optimizer steps it has done; called again, it goes on with the next one.

        Args:
            global_steps: of the run; `freezing_actor_steps` and the files of logs count by it.

        Returns:
            Metrics averaged over all optimizer steps on this experience (those of a call that was stopped, too), equal
            on all ranks: `policy_loss`, `kl`, `actor_lr`, …, those of the rollout, and `train_steps`, their number;
            with a critic `critic_loss`. Where no step fell due, those of the sequences that wait for one. A loss that
            was not computed is NaN: of a frozen actor, or one that waits for the whole step (`Loss.plan`).

        Raises:
            StateError: the buffer is empty. Stopped: gradients are cleared, no optimizer is half stepped; where the
            steps were done and the engine does not have them yet, the next call sends them.
        """
        if not len(self.replay_buffer):
            raise StateError("there is no experience to train on: call make_experience() first")
        begin = time.perf_counter()
        self._say_mode()
        frozen = global_steps < self.options.ppo.freezing_actor_steps
        optimizers = [one for one in (self.actor_optim, self.critic_optim) if one is not None]
        for optimizer in optimizers:
            self.strategy.maybe_load_optimizer(optimizer)
        try:
            self._train(frozen)
        finally:
            for optimizer in optimizers:
                self.strategy.maybe_offload_optimizer(optimizer)
        metrics = self._losses() | self.rollout_metrics
        metrics |= {"train_steps": float(len(self._done)), "optimizer_steps": float(self.optimizer_steps)}
        metrics["perf/ppo_train_s"] = time.perf_counter() - begin
        if self.unsent:
            metrics |= self.send_weights()
        self._adapt()
        trained_on = self.replay_buffer.items
        self._experience_is_done()
        self.log.trained(trained_on, global_steps)
        return metrics

    def _losses(self) -> Metrics:
        """Of the steps on this experience, else of what waits; collective."""
        losses = ("policy_loss",) if self.value_update is None else ("policy_loss", "critic_loss")
        found = self._done or [update.so_far() for update in self.updates if update.waiting]
        return dict.fromkeys(losses, math.nan) | mean_of(found)

    # -- steps --------------------------------------------------------------------------------------------------

    def _train(self, frozen: bool) -> None:
        self.actor.train()
        if self.critic is not None:
            self.critic.train()
        self._drop_lost()
        for part, span in self._parts():
            metrics = self._one_part(part, span, frozen)
            if metrics is not None:
                self._done.append(metrics)
            self._place += span

    def _parts(self) -> Iterator[tuple[Experience, int]]:
        """What of the experience goes to each optimizer step, over all epochs, from where a stopped call was.

        The rank with the most sequences counts; one that has fewer adds less to the last part.
        """
        control, items = self.strategy.control, self.replay_buffer.items
        whole: Experience = control.together("joining the experience", lambda: Experience.joined(items))
        longest = max(control.gather(len(whole)))
        at = self._place
        while at < longest * self.options.ppo.max_epochs:
            start = at % longest
            stop = min(start + self._per_rank - self._waiting, longest)
            yield whole.rows(np.arange(min(start, len(whole)), min(stop, len(whole)))), stop - start
            at += stop - start

    def _one_part(self, part: Experience, span: int, frozen: bool) -> Metrics | None:
        """Add the gradients of a part; the step's metrics once there are as many sequences as a step has."""
        size = self.options.strategy.micro_train_batch_size
        batches = [part.rows(np.arange(i, min(i + size, len(part)))) for i in range(0, len(part), size)]
        if not self._waiting:
            self._began, self._texts_began = self._place, self.pretraining.state()
        whole = self._waiting + span >= self._per_rank
        metrics: Metrics = {}
        try:
            if not frozen:
                self.policy_update.accumulate(batches, self.pretraining.texts(span))
            if self.value_update is not None:
                self.value_update.accumulate(batches)
            if whole and not frozen:
                metrics |= self.policy_update.finish()
                self._committed = self.unsent = True
            if whole and self.value_update is not None:
                metrics |= self.value_update.finish()
        except BaseException:
            self._forget()
            raise
        finally:
            self._committed = False
        self._waiting = 0 if whole else self._waiting + span
        if not whole:
            return None
        self.optimizer_steps += 1
        if self.ema_model is not None and not frozen:
            self.strategy.moving_average(
                self.actor, self.ema_model, self.options.ppo.ema_beta, self.strategy.device.device
            )
        return metrics

    def _may_stop(self) -> bool:
        return not self._committed and context.current().stop_requested()

    def _forget(self) -> None:
        """Drop the gradients of a step that failed or was stopped; its share of this experience is trained on again."""
        self.drop_gradients()
        self._place = self._began
        self.pretraining.restore(self._texts_began)

    def _drop_lost(self) -> None:
        """Begin the step anew on all ranks where somebody cleared gradients that waited for it."""
        if any(self.strategy.control.gather(any(update.lost_gradients for update in self.updates))):
            self.strategy.print("gradients that waited for their step are gone; the step begins anew")
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients that wait for a step, and the count of the sequences they came from."""
        self.policy_update.clear()
        if self.value_update is not None:
            self.value_update.clear()
        self._waiting = 0

    def _experience_is_done(self) -> None:
        self.replay_buffer.clear()
        self._place = self._began = 0
        self._done = []

    def went_elsewhere(self) -> None:
        """A checkpoint was loaded: experience and gradients that wait are of other weights, and forgotten."""
        super().went_elsewhere()
        self.drop_gradients()
        self._experience_is_done()
        self._weigh_kl()

    @property
    def sequences_waiting(self) -> tuple[int, int]:
        """Of a rank: sequences whose gradients wait for their step, and those that a step has."""
        return self._waiting, self._per_rank

    def waiting_state(self) -> dict[str, Any]:
        """The experience that waits, and how far the training on it is; without the gradients that wait."""
        updates = {update.name: update.waiting_state() for update in self.updates}
        return {
            "experience": list(self.replay_buffer.items),
            "draws": self.replay_buffer.state(),
            "updates": updates,
            **{name: getattr(self, name) for name in OF_EXPERIENCE},
        }

    def restore_waiting(self, state: dict[str, Any]) -> None:
        """Go on with what `waiting_state` gave; the gradients are the caller's to put back."""
        self.replay_buffer.items = list(state["experience"])
        self.replay_buffer.restore(state["draws"])
        for name in OF_EXPERIENCE:
            setattr(self, name, state[name])
        for update in self.updates:
            update.restore_waiting(state["updates"][update.name])
        self._weigh_kl()

    @property
    def updates(self) -> list[PolicyUpdate | ValueUpdate]:
        """The policy's, and the critic's where there is one."""
        return [self.policy_update, *([] if self.value_update is None else [self.value_update])]

    # -- around them --------------------------------------------------------------------------------------------

    def _adapt(self) -> None:
        """Let the weight of the KL follow the KL that was seen, and with `use_kl_loss` the loss follow the weight."""
        observed = self.rollout_metrics.get("rollout_ref_kl_per_sequence")
        if observed is None or not isinstance(self.kl_ctl, AdaptiveKL):
            return
        own = sum(int(part.trained.sum()) for part in self.replay_buffer.items)
        samples = sum(self.strategy.control.gather(own))
        self.kl_ctl = self.kl_ctl.update(observed, samples)
        self._weigh_kl()

    def _weigh_kl(self) -> None:
        if self.options.strategy.use_kl_loss and self.loss is None and isinstance(self.policy_loss, PolicyLoss):
            self.policy_loss = replace(self.policy_loss, kl_coef=self.kl_ctl.coef)
            self.policy_update.loss = self.policy_loss

    def _check_own_loss(self, loss: Loss) -> None:
        """Refuse what a loss of the user's leaves without effect."""
        for name in OF_OUR_LOSS:
            if getattr(self.options.ppo, name):
                raise OptionError(f"{name} would have no effect with a loss of your own: build it into that.")
        if self.options.strategy.use_kl_loss and not getattr(loss, "needs_reference", False):
            raise OptionError("use_kl_loss would have no effect with a loss of your own that has no KL: build it in.")

    def _say_mode(self) -> None:
        held = sum(self.strategy.control.gather(len(self.replay_buffer)))
        whole = self.options.strategy.train_batch_size
        if self._said or held == whole:
            return
        self._said = True
        kind = "HIGH FREQUENCY UPDATE MODE" if whole < held else "ACCUMULATION MODE"
        steps = f"{held / whole:g} steps per ppo_train" if whole < held else f"a step every {whole / held:g} ppo_train"
        self.strategy.print(f"{kind}: train_batch_size {whole}, {held} sequences of experience: {steps}")


class SPMDPPOTrainer(SPMDPPOTrainerBase):
    """PPO and its relatives for language models on the ranks of a session.

    Args:
        args, kwargs: of `SPMDPPOTrainerBase` and `PPOTrainer`.

    Example:
        trainer = SPMDPPOTrainer(
            strategy, actor, critic, reward, reference, None, actor_optim, critic_optim, None, None,
            tokenizer=tokenizer, prompts=prompts, max_epochs=2,
        )
        for step in range(30):
            trainer.make_experience()
            metrics = trainer.ppo_train(step)
    """


class SPMDPPOTrainerVL(SPMDPPOTrainer):
    """The reference system's trainer of vision-language models: a name to import; making one is refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "VLM": True})
