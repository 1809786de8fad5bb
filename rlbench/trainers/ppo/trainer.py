"""`PPOTrainer`: what the trainers of a policy on the ranks share: models, prompts, experience, evaluation, a whole run.

Every method is collective: all ranks call it, with the same arguments, and get the same numbers back. The update itself
is in `spmd_ppo_trainer`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from rlbench.data import Mixture, Prompt, PromptSet, PromptStream
from rlbench.errors import DataError, StateError
from rlbench.rl import AdaptiveKL, Aggregation, FixedKL
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.options.config import OptionError
from rlbench.trainers.experience.maker import FastExperienceMaker
from rlbench.trainers.experience.replay_buffer import NaiveReplayBuffer
from rlbench.trainers.experience.samples import ENGINE_NAMES
from rlbench.trainers.options.trainer_options import TrainerOptions, doubts, read_options
from rlbench.trainers.ppo.files import Checkpoints
from rlbench.trainers.ppo.pretraining import Pretraining
from rlbench.trainers.reports.trainer_log import TrainerLog

Metrics = dict[str, float]


class PPOTrainer:
    """Rolls out, scores, and keeps the experience that an update trains on.

    Args:
        strategy: of the rank, with its inference engine set up.
        actor: the policy, prepared by the strategy (or the session's own module).
        critic: prepared; of `make_critic`, or one of the user's own, see `own_critic`. Advantages come from GAE then
            unless an estimator is named; None: they come from groups of samples.
        reward_model: what scores: a module with a scalar head on the ranks, a Python reward (as of `rollouts.score`),
            the address of a service, or a list of such.
        initial_model: the frozen reference policy; None where no KL is asked for.
        ema_model: follows the actor by a moving average; None: there is none.
        actor_optim, critic_optim, actor_scheduler, critic_scheduler: of the two; no scheduler: None.
        tokenizer: of the actor.
        prompts: where `make_experience` takes its prompts from: a `PromptSet`, a stream or mixture of `rlbench.data`,
            or anything `as_prompts` takes. The trainer owns its place in them.
        eval_prompts: of `evaluate`.
        reward_fn: makes one reward of several models': `(model_rewards, labels, queries, refs, label_map)`.
        reward_fn_label_map, reward_recipe: see `FastExperienceMaker`.
        remote_rm_url: a reward service, or several.
        pretrain_prompts: texts of the language loss of `ptx_coef`.
        processor: of vision-language models, which are not here yet.
        loss: a loss of your own (a name, a value of `rlbench.rl` or a function) in place of the options'.
        options: of `PPOConfig` and of `StrategyConfig`, by name; of the latter the strategy's own where not given.

    Raises:
        OptionError: an option that means nothing, or contradicts another one.
    """

    aggregation: Aggregation
    """How the losses of tokens become one, which the class that updates says."""

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
            for text in doubts(self.options, critic is not None, ema_model is not None):
                warnings.warn(text, stacklevel=2)
        self.actor, self.critic, self.reward_model = actor, critic, reward_model
        self.initial_model, self.ema_model = initial_model, ema_model
        self.actor_optim, self.critic_optim = actor_optim, critic_optim
        self.actor_scheduler, self.critic_scheduler = actor_scheduler, critic_scheduler
        self.tokenizer = tokenizer
        self.loss = loss
        self.pretrain_prompts = pretrain_prompts
        self._check(processor)
        if "max_norm" in self.options.given:
            strategy.max_norm = self.options.strategy.max_norm
        ppo = self.options.ppo
        self.kl_ctl: FixedKL | AdaptiveKL = FixedKL(ppo.kl_coef)
        if ppo.kl_target is not None:
            self.kl_ctl = AdaptiveKL(coef=ppo.kl_coef, target=ppo.kl_target, horizon=float(ppo.kl_horizon))
        self.prompts = None if prompts is None else _stream(prompts, strategy.seed)
        self.eval_prompts = eval_prompts
        self.pretraining = Pretraining.of(self, ppo.ptx_coef)
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
            processor,
            options=self.options.strategy,
            config=ppo,
        )
        self.replay_buffer = NaiveReplayBuffer(
            self.options.strategy.micro_train_batch_size, ppo.buffer_limit, ppo.buffer_cpu_offload
        )
        self.log = TrainerLog(self.options, strategy, tokenizer)
        self.files = Checkpoints(self)
        self.iterations = self.optimizer_steps = 0
        self.unsent = False  # the actor has changed since the engine got its weights
        self.rollout_metrics: Metrics = {}
        if ppo.gradient_checkpointing:
            _checkpoint_gradients(actor, critic)

    # -- experience ---------------------------------------------------------------------------------------------

    def make_experience(self, prompts: Any = None) -> Metrics:
        """Sample, score and weigh the next `rollout_batch_size` prompts; what comes of it waits in the replay buffer.

        Args:
            prompts: these instead of the trainer's own next ones; all of them, on every rank.

        Returns:
            Metrics of the rollout, over all ranks.

        Raises:
            Stopped: stopped; the next call draws the same again. StateError: there are no prompts.
        """
        begin = time.perf_counter()
        if self.unsent:
            self.send_weights()
        place = None if prompts is not None or self.prompts is None else self.prompts.state()
        calls = self.strategy.generate_calls
        try:
            mine = self._share(self._next_prompts(prompts))
            self.actor.eval()
            self.experience_maker.kl_ctl = self.kl_ctl
            made = self.experience_maker.make_experience_list(
                mine, more_prompts=self._more_prompts if prompts is None else None, **self.options.generate_kwargs
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

        Args:
            prompts: all of them, on every rank; None: the trainer's `eval_prompts`.
            n: samples of each.
        """
        chosen = self.eval_prompts if prompts is None else prompts
        if chosen is None:
            raise StateError("there is nothing to evaluate on: evaluate(prompts), or eval_prompts= of the trainer")
        own = {ENGINE_NAMES.get(name, name): value for name, value in sampling.items()}
        wanted = {**self.options.generate_kwargs, "temperature": 0.0, **own, "n": n}
        calls = self.strategy.generate_calls
        try:
            found = self.experience_maker.evaluate(_share_of(list(PromptSet.of(chosen)), self.strategy), **wanted)
        finally:
            self.strategy.generate_calls = calls  # what training draws next does not depend on evaluations
        return {f"eval/{name}": value for name, value in found.items()}

    def _next_prompts(self, given: Any) -> list[Prompt]:
        if given is not None:
            return list(PromptSet.of(given))
        if self.prompts is None:
            raise StateError("the trainer has no prompts: prompts= of the trainer, or make_experience(prompts)")
        return self._taken(self.options.ppo.rollout_batch_size)

    def _taken(self, count: int) -> list[Prompt]:
        assert self.prompts is not None
        found = self.prompts.take(count) if count else []
        if len(found) < count:
            raise DataError(f"the prompts have ended: {count} were wanted, {len(found)} are left")
        return found

    def _share(self, prompts: list[Prompt]) -> list[Prompt]:
        """This rank's part, in order; equal for all ranks, as an update counts sequences by rank."""
        world = self.strategy.world_size
        if len(prompts) % world:
            raise OptionError(
                f"{len(prompts)} prompts (rollout_batch_size) cannot be shared out evenly over {world} ranks; make it "
                f"a multiple of {world}."
            )
        return _share_of(prompts, self.strategy)

    def _more_prompts(self, count: int) -> list[Prompt]:
        """Further prompts for this rank, where groups of its own were dropped; collective."""
        counts = self.strategy.control.gather(count)
        found = self._taken(sum(counts))
        start = sum(counts[: self.strategy.rank])
        return found[start : start + count]

    # -- what a subclass keeps ------------------------------------------------------------------------------------

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

    # -- the long run -------------------------------------------------------------------------------------------

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

        Returns:
            The metrics of each iteration.
        """
        if prompts_dataloader is not None:
            self.prompts = _stream(prompts_dataloader, self.strategy.seed)
        if pretrain_dataloader is not None:
            self.pretrain_prompts = pretrain_dataloader
            self.pretraining = Pretraining.of(self, self.options.ppo.ptx_coef)
        self.eval_prompts = self.eval_prompts if eval_dataloader is None else eval_dataloader
        episodes = num_episodes or getattr(args, "num_episodes", None) or 1
        wanted = max_steps if max_steps is not None else getattr(args, "max_steps", None)
        last = wanted or episodes * (num_update_steps_per_episodes or self._iterations_of_an_episode())
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
        self.files.save_at_the_end()
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

    def _iterations_of_an_episode(self) -> int:
        if not isinstance(self.prompts, PromptStream):
            raise StateError("how long is an episode of a mixture? give max_steps or num_update_steps_per_episodes")
        return max(1, len(self.prompts.prompts) // self.options.ppo.rollout_batch_size)

    # -- checks -------------------------------------------------------------------------------------------------

    def _check(self, processor: Any) -> None:
        options = self.options.strategy
        if processor is not None:
            raise OptionError("processor: vision-language models are not here yet. Leave it out.")
        if type(self).get_extra_state is not PPOTrainer.get_extra_state and not self.takes_extra_state:
            raise OptionError(
                f"{type(self).__name__} defines get_extra_state and no set_extra_state(state): what it keeps could not "
                "go back. Define both, or neither."
            )
        if options.pretrain_data is not None and self.pretrain_prompts is None:
            raise OptionError(
                f"pretrain_data={options.pretrain_data!r} cannot be honoured by a trainer: `rlbench train` reads it. "
                "Give the texts themselves, as pretrain_prompts."
            )
        if self.critic is None and options.advantage_estimator == "gae":
            raise OptionError("advantage_estimator='gae' needs a critic; give one, or 'group_norm' for GRPO.")
        needs = self.options.ppo.kl_coef > 0
        if needs and self.initial_model is None:
            raise OptionError(
                f"kl_coef={self.options.ppo.kl_coef:g} needs a reference: give initial_model, or kl_coef=0."
            )
        if self.initial_model is not None and not needs:
            raise OptionError("initial_model would have no effect with kl_coef=0: give a weight, or no reference.")
        if options.use_kl_loss and not needs:
            raise OptionError("use_kl_loss would have no effect with kl_coef=0: give a weight above 0.")


def _stream(prompts: Any, seed: int) -> PromptStream | Mixture:
    """Prompts as something with a place: a stream stays what it is."""
    if isinstance(prompts, PromptStream | Mixture):
        return prompts
    return PromptSet.of(prompts).stream(seed=seed)


def _share_of(prompts: Sequence[Prompt], strategy: StrategyBase) -> list[Prompt]:
    """Neighbouring prompts go to one rank, so that all ranks' shares in a row are the prompts in their order."""
    cuts = np.linspace(0, len(prompts), strategy.world_size + 1).round().astype(int)
    return list(prompts[cuts[strategy.rank] : cuts[strategy.rank + 1]])


def _checkpoint_gradients(*models: nn.Module | None) -> None:
    for model in models:
        if model is None:
            continue
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if not callable(enable):
            raise OptionError(f"gradient_checkpointing: {type(model).__name__} does not offer it. Leave it out.")
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def mean_of(steps: Iterable[Mapping[str, float]]) -> Metrics:
    """Each metric's mean over the steps that have it."""
    found: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            found.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}
