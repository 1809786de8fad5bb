"""`PPOTrainer`: what the trainers of a policy on the ranks share: models, prompts, experience, evaluation, a whole run.

Every method is collective: all ranks call it, with the same arguments, and get the same numbers back.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from rlbench.data import Prompt, PromptSet, PromptStream, TrainBatch
from rlbench.errors import DataError, StateError
from rlbench.options import OptionError, refuse
from rlbench.rl import AdaptiveKL, Aggregation, FixedKL
from rlbench.strategies.base import StrategyBase
from rlbench.trainers.experience.maker import FastExperienceMaker
from rlbench.trainers.experience.replay_buffer import NaiveReplayBuffer
from rlbench.trainers.experience.samples import ENGINE_NAMES, tokenizer_of
from rlbench.trainers.models.policy_module import recompute_activations
from rlbench.trainers.options.trainer_options import TrainerOptions, doubts, read_options
from rlbench.trainers.ppo.pretraining import Pretraining, stream_of
from rlbench.trainers.ppo.state import TrainerCheckpoints
from rlbench.trainers.reports.trainer_log import TrainerLog

Metrics = dict[str, Any]  # numbers, and texts that say of which rows they are


class PPOTrainer:
    """Rolls out, scores, and keeps the experience that an update trains on.

    Args:
        strategy: of the rank, with its inference engine set up.
        actor: the policy, prepared by the strategy (or the session's own module).
        critic: prepared; of `make_critic`, or one of the user's own. Advantages come from GAE then unless an estimator
            is named; None: they come from groups of samples.
        reward_model: what scores: a module with a scalar head on the ranks, a Python reward (as of `rollouts.score`),
            the address of a service, or a list of such.
        initial_model: the frozen reference policy; None where no KL is asked for.
        ema_model: follows the actor by a moving average.
        tokenizer: of the actor.
        prompts: where `make_experience` takes its prompts from: a `PromptSet`, a stream or mixture, or anything
            `as_prompts` takes. The trainer owns its place in them.
        eval_prompts: of `evaluate`.
        reward_fn, reward_fn_label_map, reward_recipe, remote_rm_url: see `RewardStage`.
        pretrain_prompts: texts of the language loss of `ptx_coef`.
        processor: of a vision-language model; see `FastExperienceMaker`.
        loss: a loss of your own (a name, a value of `rlbench.rl` or a function) in place of the options'.
        options: of `PPOConfig` and of `StrategyConfig`, by name; of the latter the strategy's own where not given.
    """

    aggregation: Aggregation
    """How the losses of tokens become one, which the class that updates says."""
    samples = True
    """Whether it draws from the session's replicas, and brings them its weights."""

    def __init__(
        self,
        strategy: StrategyBase,
        actor: nn.Module,
        critic: nn.Module | None = None,
        reward_model: Any = None,
        initial_model: nn.Module | None = None,
        ema_model: nn.Module | None = None,
        actor_optim: Any = None,
        critic_optim: Any = None,
        actor_scheduler: Any = None,
        critic_scheduler: Any = None,
        *,
        tokenizer: Any = None,
        prompts: Any = None,
        eval_prompts: Any = None,
        reward_fn: Any = None,
        reward_fn_label_map: Mapping[str, Any] | None = None,
        reward_recipe: Mapping[str, Any] | None = None,
        remote_rm_url: str | list[str] | None = None,
        pretrain_prompts: Any = None,
        processor: Any = None,
        loss: Any = None,
        **options: Any,
    ) -> None:
        self.strategy = strategy
        self.options: TrainerOptions = read_options(strategy.config, options, critic is not None)
        if strategy.is_rank_0():
            read, models = self.options, (critic is not None, ema_model is not None)
            for text in doubts(read.strategy, read.ppo, read.given, *models):
                warnings.warn(text, stacklevel=2)
        self.actor, self.critic, self.reward_model = actor, critic, reward_model
        self.initial_model, self.ema_model = initial_model, ema_model
        self.actor_optim, self.critic_optim = actor_optim, critic_optim
        self.actor_scheduler, self.critic_scheduler = actor_scheduler, critic_scheduler
        self.tokenizer = tokenizer = tokenizer_of(tokenizer, processor)
        self.loss = loss
        self._check(pretrain_prompts)
        if "max_norm" in self.options.given:
            strategy.max_norm = self.options.strategy.max_norm
        ppo = self.options.ppo
        self.kl_ctl: FixedKL | AdaptiveKL = FixedKL(ppo.kl_coef)
        if ppo.kl_target is not None:
            self.kl_ctl = AdaptiveKL(coef=ppo.kl_coef, target=ppo.kl_target, horizon=float(ppo.kl_horizon))
        self.prompts = None if prompts is None else stream_of(prompts, strategy.seed)
        self.eval_prompts = eval_prompts
        self.pretraining = Pretraining(self, pretrain_prompts)
        self.experience_maker = FastExperienceMaker(
            actor,
            critic,
            reward_model,
            initial_model,
            tokenizer,
            ppo.prompt_max_len,
            self.kl_ctl,
            strategy,
            remote_rm_url or self.options.strategy.remote_rm_url,
            reward_fn,
            reward_fn_label_map,
            reward_recipe,
            self.options.strategy.packing,
            options=self.options.strategy,
            config=ppo,
        )
        self.replay_buffer = NaiveReplayBuffer(self.options.strategy.micro_train_batch_size, ppo.buffer_limit)
        self.log = TrainerLog(self.options, strategy, tokenizer)
        self.files = TrainerCheckpoints(self)
        self.iterations = self.optimizer_steps = 0
        self.unsent = False  # the actor has changed since the engine got its weights
        self.rollout_metrics: Metrics = {}
        self.shown: TrainBatch | None = None  # some of what this rank trained on last
        if ppo.gradient_checkpointing:
            for model in [actor] if critic is None else [actor, critic]:
                recompute_activations(model, ppo.gradient_checkpointing_use_reentrant)

    def make_experience(self, prompts: Any = None) -> Metrics:
        """Sample, score and weigh the next `rollout_batch_size` prompts, or those given, all of them on every rank.

        What comes of it waits in the replay buffer. Returns metrics of the rollout, over all ranks. After a stop the
        next call draws the same again.
        """
        begin = time.perf_counter()
        if self.unsent:
            self.send_weights()
        place = None if prompts is not None or self.prompts is None else self.prompts.state()
        calls = self.strategy.generate_calls
        try:
            mine = self._next_prompts(prompts)
            self.actor.eval()
            self.experience_maker.kl_ctl = self.kl_ctl
            made = self.experience_maker.make_experience_list(
                mine, more_prompts=self._more_prompts if prompts is None else None, **self.options.sampling
            )
        except BaseException:
            if place is not None and self.prompts is not None:
                self.prompts.restore(place)
            self.strategy.generate_calls = calls
            raise
        for experience in made:
            self.replay_buffer.append(experience)
        seconds = time.perf_counter() - begin
        self.rollout_metrics = {**self.experience_maker.metrics, "perf/make_experience_s": seconds}
        self.log.made(made, self.iterations)
        return dict(self.rollout_metrics)

    def evaluate(self, prompts: Any = None, n: int = 1, **sampling: Any) -> Metrics:
        """Mean reward of the policy as the engine has it, greedy unless told otherwise; training does not feel it.

        `prompts`: all of them, on every rank, instead of the trainer's `eval_prompts`; `n` samples of each.
        """
        chosen = self.eval_prompts if prompts is None else prompts
        if chosen is None:
            raise StateError("there is nothing to evaluate on: evaluate(prompts), or eval_prompts= of the trainer")
        own = {ENGINE_NAMES.get(name, name): value for name, value in sampling.items()}
        calls = self.strategy.generate_calls
        try:
            mine = self._share_of(list(PromptSet.of(chosen)))
            found = self.experience_maker.evaluate(mine, n=n, **{**self.options.sampling, "temperature": 0.0, **own})
        finally:
            self.strategy.generate_calls = calls  # what training draws next does not depend on evaluations
        return {f"eval/{name}": value for name, value in found.items()}

    def _next_prompts(self, given: Any) -> list[Prompt]:
        """This rank's part of the prompts, in order; equal for all ranks, as an update counts sequences by rank."""
        prompts = self._taken(self.options.ppo.rollout_batch_size) if given is None else list(PromptSet.of(given))
        if len(prompts) % (world := self.strategy.world_size):
            raise OptionError(
                f"rollout_batch_size: {len(prompts)} prompts cannot be shared out evenly over {world} ranks."
            )
        return self._share_of(prompts)

    def _share_of(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Neighbouring prompts go to one rank, so that all ranks' shares in a row are the prompts in their order."""
        rank, cuts = self.strategy.rank, np.linspace(0, len(prompts), self.strategy.world_size + 1).round().astype(int)
        return list(prompts[cuts[rank] : cuts[rank + 1]])

    def _taken(self, count: int) -> list[Prompt]:
        if self.prompts is None:
            raise StateError("the trainer has no prompts: prompts= of the trainer, or make_experience(prompts)")
        found = self.prompts.take(count) if count else []
        if len(found) < count:
            raise DataError(f"the prompts have ended: {count} were wanted, {len(found)} are left")
        return found

    def _more_prompts(self, count: int) -> list[Prompt]:
        """Further prompts for this rank, where groups of its own were dropped; collective."""
        counts = self.strategy.control.gather(count)
        start = sum(counts[: self.strategy.rank])
        return self._taken(sum(counts))[start : start + count]

    def get_extra_state(self) -> Any:
        """What a class of your own keeps in attributes and wants back where the run goes back; None: nothing.

        Snapshots keep it for each rank, so `undo`, `restore` and `branch` bring it back; `save` keeps rank 0's, so
        plain values and tensors alone, equal on all ranks. The two methods are named as torch's `nn.Module` names them.
        """
        return None

    def set_extra_state(self, state: Any) -> None:
        """Take what `get_extra_state` gave; not called where that was None."""
        raise NotImplementedError(f"{type(self).__name__} defines no set_extra_state(state)")

    @property
    def takes_extra_state(self) -> bool:
        """Whether the class defines `set_extra_state`."""
        return type(self).set_extra_state is not PPOTrainer.set_extra_state

    def ppo_train(self, global_steps: int = 0) -> Metrics:
        """Train on what waits in the replay buffer; see `SPMDPPOTrainerBase.ppo_train`."""
        raise NotImplementedError(f"{type(self).__name__} defines no ppo_train(global_steps); SPMDPPOTrainer does")

    def fit(
        self,
        args: Any = None,
        prompts_dataloader: Any = None,
        pretrain_dataloader: Any = None,
        eval_dataloader: Any = None,
        consumed_samples: int = 0,
        num_update_steps_per_episodes: int | None = None,
        *,
        max_steps: int | None = None,
        num_episodes: int | None = None,
    ) -> list[Metrics]:
        """Make experience and train, again and again; saves, evaluates and logs as the options say.

        Stopped, or called again, it goes on where it was: with what waits in the buffer, and the next prompts.

        Args:
            args: a namespace with `num_episodes`, `max_steps`, … ; the arguments of the same names count where given.
            prompts_dataloader, pretrain_dataloader, eval_dataloader: prompts instead of the trainer's own.
            consumed_samples: prompts to pass over first.
            num_update_steps_per_episodes: iterations of an episode; None: as many as the prompts give.
            max_steps: iterations at most, counted from the trainer's first.
            num_episodes: passes over the prompts; None: one.
        """
        if prompts_dataloader is not None:
            self.prompts = stream_of(prompts_dataloader, self.strategy.seed)
        if pretrain_dataloader is not None:
            self.pretraining = Pretraining(self, pretrain_dataloader)
        self.eval_prompts = self.eval_prompts if eval_dataloader is None else eval_dataloader
        episodes = num_episodes or getattr(args, "num_episodes", None) or 1
        wanted = max_steps if max_steps is not None else getattr(args, "max_steps", None)
        count = num_update_steps_per_episodes or 0
        if not wanted and not count:
            if not isinstance(self.prompts, PromptStream):
                raise StateError("how long is an episode of a mixture? give max_steps or num_update_steps_per_episodes")
            count = max(1, len(self.prompts.prompts) // self.options.ppo.rollout_batch_size)
        last = wanted or episodes * count
        if self.options.ppo.load_checkpoint and self.iterations == 0:
            self.files.load_newest()
        if consumed_samples and self.iterations == 0 and self.prompts is not None:
            self.prompts.take(consumed_samples)
        done: list[Metrics] = []
        while self.iterations < last:
            done.append(self.iterate())
            self.log.say({**done[-1], "aggregation": self.aggregation.mode}, self.iterations)
        self.finish()
        return done

    def finish(self) -> None:
        """The run is over: what is kept at its end is written."""
        self.files.save_if_due(at_the_end=True)
        self.files.save_critic()
        self.log.close()

    def iterate(self) -> Metrics:
        """One iteration of `fit`: experience (unless some waits from a call that was stopped), update, evaluation."""
        if not len(self.replay_buffer):
            self.make_experience()
        metrics = self.train_on_waiting()
        self.files.save_if_due()  # first: an evaluation may be stopped
        every = self.options.ppo.eval_steps
        if every > 0 and self.iterations % every == 0 and self.eval_prompts is not None:
            metrics |= self.evaluate()
        self.log.iterated(metrics, self.iterations)
        return metrics

    def train_on_waiting(self) -> Metrics:
        """`ppo_train` of the next iteration, which is counted once it is done."""
        metrics = self.ppo_train(self.iterations)
        self.iterations += 1
        return metrics

    @property
    def experience_waits(self) -> bool:
        """Whether some is left to train on."""
        return len(self.replay_buffer) > 0

    def send_weights(self) -> Metrics:
        """Give the inference engine the actor's weights; says how long that took, and what the engine proved."""
        begin = time.perf_counter()
        done = self.strategy.update_engine_weights(self.actor)
        self.unsent = False
        found = {"perf/sync_s": time.perf_counter() - begin, "engine_version": float(done["version"])}
        if done.get("gap") is not None:
            found["engine_gap"] = float(done["gap"])
        return found

    def went_elsewhere(self) -> None:
        """A checkpoint was loaded: what waits was made with other weights, and is forgotten."""
        self.replay_buffer.clear()
        self.unsent = True

    def _check(self, pretrain_prompts: Any) -> None:
        name, texts = type(self).__name__, self.options.strategy.pretrain_data
        one_way = type(self).get_extra_state is not PPOTrainer.get_extra_state and not self.takes_extra_state
        idle = self.initial_model is not None and self.options.ppo.kl_coef == 0
        refuse(
            (one_way, f"{name} defines get_extra_state and no set_extra_state(state): define both, or neither"),
            (texts and pretrain_prompts is None, f"pretrain_data={texts!r} cannot be honoured: give pretrain_prompts"),
            (idle, "initial_model would have no effect with kl_coef=0: give a weight, or no reference"),
        )
