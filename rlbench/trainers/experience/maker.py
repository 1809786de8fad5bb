"""`FastExperienceMaker`: from prompts to experience that can be trained on, on each rank for its own share of them.

    generate -> rewards -> (dynamic sampling: again, for groups that teach nothing)
             -> log-probs of actor and reference, values -> shaping -> advantages -> micro-batches

Everything is collective, and between the stages the ranks ask each other whether one of them was stopped or failed;
then all of them end, and nothing of the maker has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from rlbench.data.batches.batch import TrainBatch
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.prompts.sampling import reshaped_by, reshaped_notes
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.errors import DataError
from rlbench.rl import MismatchMoments, RunningMoments
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.options.config import OptionError, StrategyConfig
from rlbench.trainers.experience import metrics as experience_metrics
from rlbench.trainers.experience.advantage_stage import Estimated, Samples, check_estimator, estimated
from rlbench.trainers.experience.dynamic_sampling import MorePrompts, with_signal
from rlbench.trainers.experience.model_stage import ModelStage
from rlbench.trainers.experience.over_ranks import agreed, check_stop
from rlbench.trainers.experience.reward_stage import Recipe, RewardFn, RewardStage
from rlbench.trainers.experience.samples import counted, encoded, prompts_of, rollouts_of, sampling_of
from rlbench.trainers.experience.shaping_stage import Shaped, check_shaping, shaped
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.trainer_options import with_estimator
from rlbench.trainers.passes.clock import Clock


@dataclass(frozen=True)
class _Judged:
    """What the models say of the samples, flat float32; None where a model was not asked."""

    old: np.ndarray
    entropy: np.ndarray | None
    ref: np.ndarray | None
    values: np.ndarray | None
    mismatch: MismatchMoments
    gap: np.ndarray | None


class FastExperienceMaker:
    """Makes experience of a rank's prompts.

    Args:
        actor: the policy; computes the old log-probs.
        critic: with `advantage_estimator="gae"` alone, which it means where none is named.
        reward_model, remote_rm_url, reward_fn, reward_recipe, reward_fn_label_map: what scores, see `RewardStage`.
        initial_model: the reference; needed where `kl_ctl` has a weight above 0, or with `use_kl_loss`.
        prompt_max_len: tokens; a longer prompt is refused.
        kl_ctl: holds the weight of the KL as `.coef`, or is a number; None: `config.kl_coef`. May be replaced
            between calls.
        strategy: the rank's, with its inference engine set up.
        packing_samples: forwards without padding; also where the options say so.
        processor: of vision-language models, which are not here yet.
        options: of the strategy; None: its own.

    Attributes:
        metrics: of the last call, over all ranks.
        seconds: of the last call, by stage, of this rank.
    """

    def __init__(
        self,
        actor: Any,
        critic: Any,
        reward_model: Any,
        initial_model: Any,
        tokenizer: Any,
        prompt_max_len: int,
        kl_ctl: Any,
        strategy: StrategyBase,
        remote_rm_url: str | Sequence[str] | None = None,
        reward_fn: RewardFn | None = None,
        reward_fn_label_map: Mapping[str, Any] | None = None,
        reward_recipe: Recipe | None = None,
        packing_samples: bool = False,
        processor: Any = None,
        *,
        options: StrategyConfig | None = None,
        config: PPOConfig | None = None,
    ) -> None:
        if processor is not None:
            raise OptionError("processor: vision-language models are not here yet. Leave it out.")
        self.actor, self.critic, self.initial_model = actor, critic, initial_model
        self.tokenizer, self.prompt_max_len, self.kl_ctl, self.strategy = tokenizer, prompt_max_len, kl_ctl, strategy
        self.options = with_estimator(strategy.config if options is None else options, critic is not None)
        self.config = PPOConfig() if config is None else config
        self.metrics: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self._rewards = RewardStage(reward_model, remote_rm_url, reward_fn, reward_recipe, reward_fn_label_map)
        self._models = ModelStage(
            strategy,
            self.options.micro_rollout_batch_size,
            packing_samples or self.options.packing,
            self.options.chunk_size if self.options.head == "chunked" else None,
        )
        self._moments = RunningMoments()
        self._groups = 0  # numbers given so far, on all ranks
        self._told: tuple[str, ...] = ()  # of the options that reshape the sampler's distribution
        self._check()
        if critic is not None:
            self._models.check_critic(critic)

    def make_experience_list(
        self,
        all_prompts: Sequence[Any],
        all_images: Any = None,
        all_videos: Any = None,
        all_references: Sequence[Any] | None = None,
        all_labels: Sequence[Any] | None = None,
        more_prompts: MorePrompts | None = None,
        **generate_kwargs: Any,
    ) -> list[Experience]:
        """Sample `n` responses to each of this rank's prompts and make experience of them; collective.

        Args:
            all_prompts: of this rank, at least one: `Prompt`s, texts, chats or token ids.
            all_images, all_videos: of vision-language models, which are not here yet.
            all_references: reference answers, which `reward_fn` gets as `refs`; kept as `meta["reference"]`. Without
                them it gets the labels.
            all_labels: in place of the prompts' labels; `reward_recipe` goes by them.
            more_prompts: gives so many further prompts for this rank, for `dynamic_sampling`; called on all ranks at
                once.
            generate_kwargs: options of sampling, in place of the trainer's (`max_new_tokens` is `max_tokens`).

        Returns:
            Experience of `micro_rollout_batch_size` sequences each, the last perhaps of fewer. A response that was cut
            by an interrupt, and one without a token, trains nothing: no other is compared with it, its reward is NaN,
            and of the metrics `aborted` alone counts it.
        """
        if any(one is not None for media in (all_images, all_videos) if media is not None for one in media):
            raise DataError("images and videos: vision-language models are not here yet. Give texts or token ids.")
        clock = Clock()
        sampling = sampling_of(self.config, self.options.n, generate_kwargs)
        prompts = agreed(
            self.strategy.control,
            "the prompts",
            lambda: self._prompts(all_prompts, all_labels, all_references, sampling, more_prompts),
        )
        drawn = None
        if self.options.dynamic_sampling and more_prompts is not None:
            control, draw = self.strategy.control, lambda asked: self._scored(asked, sampling, clock)
            drawn = with_signal(draw, prompts, more_prompts, self.options, control)
        rollouts = self._scored(prompts, sampling, clock) if drawn is None else drawn.rollouts
        batch, groups = self._batch(rollouts)
        with clock("models"):
            judged = self._judged(batch)
        with clock("advantages"):
            given = shaped(
                np.asarray(rollouts.rewards, np.float64),
                batch.response_lengths,
                int(sampling["max_tokens"]),
                self.options,
                self._moments,
                self.strategy.control,
            )
            group = batch.group.astype(np.int64)
            samples = Samples(batch.responses, batch.mask, given.rewards, group, judged.old, judged.ref, judged.values)
            found = estimated(
                samples, self.options, self._kl_coef, self.config.gamma, self.config.lambd, self.strategy.control
            )
            made = self._experience(rollouts, batch, judged, given, samples, found)
            metrics = experience_metrics.over_ranks(
                experience_metrics.columns(made, rollouts, given, found, self.options),
                rollouts.components,
                judged.mismatch,
                self.strategy.control,
            )
        if drawn is not None:
            metrics |= drawn.numbers(groups)
        self._moments, self._groups = given.moments, self._groups + groups
        self.metrics, self.seconds = metrics, dict(clock.seconds)
        size = self.options.micro_rollout_batch_size
        return [made.rows(np.arange(i, min(i + size, len(made)))) for i in range(0, len(made), size)]

    def evaluate(
        self,
        all_prompts: Sequence[Any],
        all_references: Sequence[Any] | None = None,
        all_labels: Sequence[Any] | None = None,
        n: int = 1,
        **generate_kwargs: Any,
    ) -> dict[str, float]:
        """Score `n` samples of each of this rank's prompts, which may be none; nothing is shaped, no running moment
        moves.

        Returns, over all ranks, `reward`, `reward_std`, `response_length…`, `truncated`, `samples`, and each
        component's `{name}_mean` and `{name}_std`.
        """
        sampling = sampling_of(self.config, n, generate_kwargs)
        prompts = agreed(
            self.strategy.control, "the prompts", lambda: prompts_of(all_prompts, all_labels, all_references)
        )
        return experience_metrics.evaluation(self._scored(prompts, sampling, Clock()), self.strategy.control)

    def tokenize_fn(self, texts: Any, max_length: int, padding: bool = True, device: Any = None) -> Any:
        """Return token ids of texts without special tokens, at most `max_length`, padded tensors or lists."""
        options: dict[str, Any] = {"add_special_tokens": False, "max_length": max_length, "truncation": True}
        if not padding:
            return self.tokenizer(texts, **options)
        found = self.tokenizer(texts, padding=True, return_tensors="pt", **options)
        return {name: tensor.to(device) for name, tensor in found.items()}

    @property
    def vllm_mp_group(self) -> Any:
        """The ranks that gather their prompts to their first for a call of the engine: all there are."""
        return dist.group.WORLD

    def state(self) -> dict[str, Any]:
        """Return what goes on from call to call, as plain JSON: the rewards' running moments, the number of groups."""
        moments = self._moments
        return {"groups": self._groups, "moments": [moments.count, moments.mean, moments.squares]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        count, mean, squares = state["moments"]
        self._moments = RunningMoments(int(count), float(mean), float(squares))
        self._groups = int(state["groups"])

    # -- stages ------------------------------------------------------------------------------------------------

    def _prompts(
        self,
        given: Sequence[Any],
        labels: Any,
        references: Any,
        sampling: Mapping[str, Any],
        more_prompts: MorePrompts | None,
    ) -> list[Prompt]:
        prompts = prompts_of(given, labels, references)
        if not prompts:
            raise DataError(f"rank {self.strategy.rank} has no prompts: give each rank at least one")
        if self.options.dynamic_sampling and more_prompts is None:
            raise DataError("dynamic_sampling takes further prompts in the place of some: give more_prompts")
        if not sampling["temperature"] > 0:
            raise DataError(f"temperature={sampling['temperature']}: a policy is sampled at a temperature above 0")
        return prompts

    def _scored(self, prompts: list[Prompt], sampling: Mapping[str, Any], clock: Clock) -> Rollouts:
        """Generate, and score what came."""
        control = self.strategy.control
        ids = agreed(control, "the prompts", lambda: encoded(prompts, self.tokenizer, self.prompt_max_len))
        with clock("generate"):
            outputs = self.strategy.gather_and_generate(
                dict(sampling), all_prompts=prompts, sleep_engine=self.options.enable_engine_sleep
            )
        rollouts = agreed(control, "generation", lambda: rollouts_of(prompts, ids, outputs, sampling))
        with clock("rewards"):
            return self._rewards.score(rollouts, self._models, self.tokenizer, control)

    def _batch(self, rollouts: Rollouts) -> tuple[TrainBatch, int]:
        """Return the samples, without advantages yet, and how many groups there are over all ranks; collective."""
        _, group = np.unique(rollouts.group, return_inverse=True)
        counts = self.strategy.control.gather(int(group.max()) + 1)
        first = self._groups + sum(counts[: self.strategy.rank])
        tokens = len(rollouts.logprobs)
        reshaped = reshaped_by(rollouts.sampling)
        if reshaped != self._told:
            self._told = reshaped
            self.strategy.print(*reshaped_notes(reshaped))
        batch = TrainBatch(
            prompts=rollouts.prompt_ids.take(rollouts.group),
            responses=rollouts.responses,
            mask=np.repeat(counted(rollouts), rollouts.lengths),
            advantages=np.zeros(tokens, np.float32),
            sampler_logprobs=rollouts.logprobs,
            group=(group + first).astype(np.int32),
            weight_version=rollouts.versions,
            rewards=np.array(rollouts.rewards, np.float64),
            truncated=rollouts.truncated,
            temperature=float(rollouts.sampling["temperature"]),
            reshaped_by=reshaped,
        )
        return batch, sum(counts)

    def _judged(self, batch: TrainBatch) -> _Judged:
        """Ask the actor, the reference and the critic, one after the other."""
        sampler = batch.sampler_logprobs
        if self.config.old_logprobs == "recompute":
            stats = self._models.policy_stats(self.actor, batch, "the actor's log-probs")
            old, entropy = stats.logprobs, stats.entropy
            mismatch, gap = _mismatch(batch, old), np.abs(old - sampler)
        else:  # the first micro-batch tells how far sampler and trainer are apart; the rest is not computed
            some = batch.rows(np.arange(min(len(batch), self.options.micro_rollout_batch_size)))
            stats = self._models.policy_stats(self.actor, some, "the actor's log-probs")
            old, entropy, gap, mismatch = sampler, None, None, _mismatch(some, stats.logprobs)
        ref = self._models.reference_logprobs(self.initial_model, batch) if self._needs_reference else None
        values = None if self.critic is None else self._models.values(self.critic, batch)
        check_stop(self.strategy.control, "making experience")
        return _Judged(old, entropy, ref, values, mismatch, gap)

    def _experience(
        self, rollouts: Rollouts, batch: TrainBatch, judged: _Judged, given: Shaped, samples: Samples, found: Estimated
    ) -> Experience:
        old = judged.old if self.config.old_logprobs == "recompute" else None  # None: the sampler's stand in
        whole = batch.replace(advantages=found.advantages, old_logprobs=old, ref_logprobs=judged.ref)
        return Experience(
            batch=whole,
            prompts=tuple(rollouts.prompts[int(group)] for group in rollouts.group),
            texts=rollouts.texts,
            token_rewards=found.token_rewards,
            kl=found.kl,
            values=judged.values,
            returns=found.returns if self.critic is not None else None,
            entropy=judged.entropy,
            info=experience_metrics.of_sequences(samples, found, given, whole, judged.entropy, judged.gap),
            components={name: np.asarray(values, np.float64) for name, values in rollouts.components.items()},
        )

    # -- options -----------------------------------------------------------------------------------------------

    @property
    def _kl_coef(self) -> float:
        """The weight of the KL now."""
        if self.kl_ctl is None:
            return self.config.kl_coef
        return float(getattr(self.kl_ctl, "coef", self.kl_ctl))

    @property
    def _needs_reference(self) -> bool:
        return self._kl_coef > 0 or self.options.use_kl_loss

    def _check(self) -> None:
        options = self.options
        check_estimator(options, self.config.gamma, self.critic is not None)
        check_shaping(options, self.config.max_tokens)
        if self._needs_reference and self.initial_model is None:
            raise OptionError(f"a KL of weight {self._kl_coef:g} needs a reference: give initial_model, or kl_coef=0.")
        for name in ("micro_rollout_batch_size", "n", "chunk_size", "max_num_gen_batches"):
            least = 0 if name == "max_num_gen_batches" else 1
            if getattr(options, name) < least:
                raise OptionError(f"{name}={getattr(options, name)}: it is a number from {least} on.")
        if options.dynamic_sampling and options.n < 2:
            raise OptionError("dynamic_sampling compares the samples of a prompt: n is 2 or more.")


def _mismatch(batch: TrainBatch, old: np.ndarray) -> MismatchMoments:
    """Compare sampler and trainer over the trained tokens of a batch."""
    samples = Samples(batch.responses, batch.mask, np.zeros(0), batch.group, old)
    return MismatchMoments.of(samples.padded(old), samples.padded(batch.sampler_logprobs), samples.padded(batch.mask))
