"""`SPMDPPOTrainer`: every rank makes experience of its own share of the prompts and trains on its own micro-batches.

One `ppo_train` is `max_epochs` passes over the experience in its order, `train_batch_size` sequences (over all ranks)
to an optimizer step. What is left over where they do not divide waits, as gradients, for the next call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlbench.data.joining import spread
from rlbench.dispatch import context
from rlbench.errors import StateError
from rlbench.options import OptionError
from rlbench.rl import AdaptiveKL, Aggregation, Loss, PolicyLoss, resolve
from rlbench.strategies.options.config import accumulation_steps
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.passes.sounds import media_reader
from rlbench.trainers.ppo.trainer import Metrics, PPOTrainer
from rlbench.trainers.update.experience_update import PolicyUpdate
from rlbench.trainers.update.loss_choice import loss_of
from rlbench.trainers.update.value_update import ValueUpdate

OF_EXPERIENCE = ("_waiting", "_place", "_began", "_texts_began", "_done", "rollout_metrics")
"""What is known of the experience that is being trained on."""
OF_OUR_LOSS = ("entropy_coef", "high_entropy_token_ratio", "mismatch")
"""Options of the loss that the options make; one of your own brings its own."""


class SPMDPPOTrainerBase(PPOTrainer):
    """A `PPOTrainer` with its update.

    A `micro_train_batch_size` beyond a rank's share of `train_batch_size` is that. A `loss` of your own is aggregated
    as it says, where `aggregation` does not. `VLM=True` says that the actor sees images, or hears sounds, and is
    refused of one that does neither; prompts bring theirs in any case. An `engine_tp_size` of the strategy that is not
    above 0 is an AssertionError.
    """

    def __init__(self, *args: Any, VLM: bool = False, **kwargs: Any) -> None:
        strategy = kwargs["strategy"] if "strategy" in kwargs else args[0]
        size = strategy.config.engine_tp_size
        assert size > 0, f"engine_tp_size={size}: the trainer needs an inference engine of at least one rank"
        super().__init__(*args, **kwargs)
        if VLM and media_reader(self.strategy.unwrap_model(self.actor)) is None:
            raise OptionError(
                f"VLM=True: the actor {type(self.actor).__name__} sees no images and hears no sounds. Leave it out."
            )
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
            self.aggregation = Aggregation.of_loss(self.policy_loss, ppo.aggregation)
        self.policy_update = PolicyUpdate(
            self.actor,
            self.actor_optim,
            self.actor_scheduler,
            self.strategy,
            self.policy_loss,
            self.aggregation,
            packed=options.packing,
            share_prompts=options.share_prompts,
            head=options.head,
            tile=options.chunk_size if options.head == "chunked" else None,
            temperature=ppo.temperature,
            ptx_coef=ppo.ptx_coef,
            no_signal=ppo.no_signal,
            aux_loss_coef=ppo.aux_loss_coef,
            stop_requested=self._may_stop,
        )
        self.value_update = None
        if self.critic is not None and self.critic_optim is not None:
            self.value_update = ValueUpdate(
                self.critic,
                self.critic_optim,
                self.critic_scheduler,
                self.strategy,
                ppo.value_clip,
                self.aggregation,
                packed=options.packing,
                aux_loss_coef=ppo.aux_loss_coef,
                stop_requested=self._may_stop,
            )
        if ppo.freezing_actor_steps > 0 and self.value_update is None:
            raise OptionError("freezing_actor_steps has no effect without a critic, which trains meanwhile: give one.")
        self._waiting = 0  # sequences of this rank whose gradients wait for their step
        self._place = 0  # sequences of this rank trained on in a call that was stopped
        self._began = 0  # the place at which the step that waits began, in this experience
        self._committed = False  # the actor has stepped: the critic does too, whoever asks to stop
        self._texts_began: Any = None  # and its place in the pretraining texts
        self._done: list[Metrics] = []  # of the optimizer steps on this experience

    def ppo_train(self, global_steps: int = 0) -> Metrics:
        """Train on the experience in the buffer, then give the inference engine the new weights.

        A call that was stopped leaves the optimizer steps it has done; called again, it goes on with the next one.

        Args:
            global_steps: of the run; `freezing_actor_steps` and the files of logs count by it.

        Returns:
            Metrics averaged over all optimizer steps on this experience, equal on all ranks: `policy_loss`, `kl`,
            `actor_lr`, …, those of the rollout, and `train_steps`, their number; with a critic `critic_loss`. Where no
            step fell due, those of the sequences that wait for one. A loss that was not computed is NaN.
        """
        if not len(self.replay_buffer):
            raise StateError("there is no experience to train on: call make_experience() first")
        begin = time.perf_counter()
        frozen = global_steps < self.options.ppo.freezing_actor_steps
        optimizers = [one for one in (self.actor_optim, self.critic_optim) if one is not None]
        for optimizer in optimizers:
            self.strategy.maybe_load_optimizer(optimizer)
        try:
            self._train(frozen)
        finally:
            for optimizer in optimizers:
                self.strategy.maybe_offload_optimizer(optimizer)
        losses = ("policy_loss",) if self.value_update is None else ("policy_loss", "critic_loss")
        found = self._done or [update.so_far() for update in self.updates if update.waiting]
        metrics = dict.fromkeys(losses, math.nan) | mean_of(found) | self.rollout_metrics
        metrics |= {"train_steps": float(len(self._done)), "optimizer_steps": float(self.optimizer_steps)}
        metrics["perf/ppo_train_s"] = time.perf_counter() - begin
        if self.unsent:
            metrics |= self.send_weights()
        self._adapt()
        trained_on = self.replay_buffer.items
        self.shown = spread([part.batch for part in trained_on])
        self._experience_is_done()
        return metrics | self.log.trained(trained_on, global_steps)

    def _train(self, frozen: bool) -> None:
        self.actor.train()
        if self.critic is not None:
            self.critic.train()
        if any(self.strategy.control.gather(any(update.lost_gradients for update in self.updates))):
            self.strategy.print("gradients that waited for their step are gone; the step begins anew")
            self.drop_gradients()
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
            self.drop_gradients()  # the step's share of this experience is trained on again
            self._place = self._began
            self.pretraining.restore(self._texts_began)
            raise
        finally:
            self._committed = False
        self._waiting = 0 if whole else self._waiting + span
        if not whole:
            return None
        self.optimizer_steps += 1
        if self.ema_model is not None and not frozen:
            beta, device = self.options.ppo.ema_beta, self.strategy.device.device
            self.strategy.moving_average(self.actor, self.ema_model, beta, device)
        return metrics

    def _may_stop(self) -> bool:
        return not self._committed and context.current().stop_requested()

    def drop_gradients(self) -> None:
        """Forget the gradients that wait for a step, and the count of the sequences they came from."""
        for update in self.updates:
            update.clear()
        self._waiting = 0

    def _experience_is_done(self) -> None:
        self.replay_buffer.clear()
        self._place, self._began, self._done = 0, 0, []

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
            "draws": self.replay_buffer.random.bit_generator.state,
            "updates": updates,
            **{name: getattr(self, name) for name in OF_EXPERIENCE},
        }

    def restore_waiting(self, state: dict[str, Any]) -> None:
        """Go on with what `waiting_state` gave; the gradients are the caller's to put back."""
        self.replay_buffer.items = list(state["experience"])
        self.replay_buffer.random.bit_generator.state = state["draws"]
        for name in OF_EXPERIENCE:
            setattr(self, name, state[name])
        for update in self.updates:
            update.restore_waiting(state["updates"][update.name])
        self._weigh_kl()

    @property
    def updates(self) -> list[PolicyUpdate | ValueUpdate]:
        """The policy's, and the critic's where there is one."""
        return [self.policy_update, *([] if self.value_update is None else [self.value_update])]

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


class SPMDPPOTrainer(SPMDPPOTrainerBase):
    """PPO and its relatives for language models on the ranks of a session; arguments are `PPOTrainer`'s.

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
    """`SPMDPPOTrainer` of an actor that sees images or hears sounds, under the reference system's name: `VLM=True`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "VLM": True})


def mean_of(steps: Iterable[Mapping[str, float]]) -> Metrics:
    """Each metric's mean over the steps that have it."""
    found: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            found.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}
