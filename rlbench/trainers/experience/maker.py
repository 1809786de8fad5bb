"""`FastExperienceMaker`: from prompts to experience that can be trained on, on each rank for its own share of them.

    generate -> rewards -> (dynamic sampling: again, for groups that teach nothing)
             -> log-probs of actor and reference, values -> shaping -> advantages -> micro-batches

Everything is collective. A stop or a failure ends it on all ranks between two stages, and nothing of the maker changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from rlbench.data.batches.batch import TrainBatch, media_of
from rlbench.data.prompts.chat import split_chat
from rlbench.data.prompts.lengths import begin_text, begun_note
from rlbench.data.prompts.placing import IMAGE, SOUND, VIDEO
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.prompts.sampling import reshaped_by, reshaped_notes
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.errors import DataError
from rlbench.rl import MismatchMoments, RunningMoments
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.options.config import OptionError, StrategyConfig
from rlbench.trainers.experience import metrics as experience_metrics
from rlbench.trainers.experience.advantage_stage import Samples, estimated, shaped
from rlbench.trainers.experience.dynamic_sampling import MorePrompts, with_signal
from rlbench.trainers.experience.model_stage import ModelStage
from rlbench.trainers.experience.over_ranks import agreed, check_stop
from rlbench.trainers.experience.reward_stage import Recipe, RewardFn, RewardStage
from rlbench.trainers.experience.samples import counted, encoded, prompts_of, rollouts_of, sampling_of, tokenizer_of
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.trainer_options import check_together, with_estimator
from rlbench.trainers.passes.sounds import SoundReader


class FastExperienceMaker:
    """Makes experience of a rank's prompts.

    Args:
        actor: the policy; computes the old log-probs.
        critic: with `advantage_estimator="gae"` alone, which it means where none is named.
        reward_model, remote_rm_url, reward_fn, reward_recipe, reward_fn_label_map: what scores, see `RewardStage`.
        initial_model: the reference; needed where the KL has a weight above 0.
        prompt_max_len: tokens; a longer prompt is refused.
        kl_ctl: the weight of the KL as `.coef`, or a number; None: `config.kl_coef`. May be replaced between calls.
        strategy: the rank's, with its inference engine set up.
        processor: of a vision-language model: its tokenizer, where none is given; ranks make pixels of images by the
            checkpoint's own.
        options: of the strategy; None: its own.

    `metrics` are those of the last call, over all ranks.
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
        tokenizer = tokenizer_of(tokenizer, processor)
        self.actor, self.critic, self.initial_model = actor, critic, initial_model
        self.tokenizer, self.prompt_max_len, self.kl_ctl, self.strategy = tokenizer, prompt_max_len, kl_ctl, strategy
        self.options = with_estimator(strategy.config if options is None else options, critic is not None)
        self.config = PPOConfig() if config is None else config
        self.metrics: dict[str, Any] = {}
        self._rewards = RewardStage(
            *(reward_model, remote_rm_url, reward_fn, reward_recipe, reward_fn_label_map),
            allowed=self.config.reward_failures,
        )
        head, prompts = self.options.head, self.options.micro_rollout_batch_size
        chunk_rows = None if head == "plain" else self.options.chunk_size
        packed = packing_samples or self.options.packing
        self._models = ModelStage(strategy, prompts, packed, chunk_rows, head, self.options.share_prompts)
        self._moments = RunningMoments()
        self._groups = 0  # numbers given so far, on all ranks
        self._begun = False  # whether it was said that texts begin with what the tokenizer puts before them
        self._told: tuple[str, ...] = ()  # of the options that reshape the sampler's distribution
        check_together(self.options, self.config, critic is not None)
        if self._needs_reference and initial_model is None:
            raise OptionError(f"a KL of weight {self._kl_coef:g} needs a reference: give initial_model, or kl_coef=0.")
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
            all_images: of each prompt, where it does not hold them itself: one, several, or None. Sounds of an actor
                that hears, as the reference system hands them over.
            all_videos: likewise of videos.
            all_references: reference answers, which `reward_fn` gets as `refs`; without them it gets the labels.
            all_labels: in place of the prompts' labels; `reward_recipe` goes by them.
            more_prompts: gives so many further prompts for this rank, for `dynamic_sampling`; called on all ranks at
                once.
            generate_kwargs: options of sampling, in place of the trainer's (`max_new_tokens` is `max_tokens`).

        Returns:
            Experience of `micro_rollout_batch_size` sequences each, the last perhaps of fewer. A response that was cut
            by an interrupt, and one without a token, trains nothing: no other is compared with it, its reward is NaN,
            and of the metrics `aborted` alone counts it. Nor does a group in which a reward failed, which
            `reward_failed` and `groups_left_out` count and `reward_failed_rows` tells of.
        """
        sampling = sampling_of(self.config, self.options.n, generate_kwargs)
        control = self.strategy.control

        def asked() -> list[Prompt]:
            kind = SOUND if SoundReader.of(self.strategy.unwrap_model(self.actor)) is not None else IMAGE
            media = {kind: all_images, VIDEO: all_videos}
            prompts = prompts_of(all_prompts, all_labels, all_references, media)
            if not prompts:
                raise DataError(f"rank {self.strategy.rank} has no prompts: give each rank at least one")
            if self.options.dynamic_sampling and more_prompts is None:
                raise DataError("dynamic_sampling takes further prompts in the place of some: give more_prompts")
            if self.critic is not None and any(prompt.videos for prompt in prompts):
                raise DataError("prompts have videos, and critics watch none: take an estimator without a critic")
            if not sampling["temperature"] > 0:
                raise DataError(f"temperature={sampling['temperature']}: a policy is sampled at a temperature above 0")
            return prompts

        prompts = agreed(control, "the prompts", asked)
        numbers: dict[str, float] = {}
        if self.options.dynamic_sampling and more_prompts is not None:
            draw = lambda further: self._scored(further, sampling)  # noqa: E731
            rollouts, numbers = with_signal(draw, prompts, more_prompts, self.options, control)
        else:
            rollouts = self._scored(prompts, sampling)
        batch, groups = self._batch(rollouts)
        scores, lengths, most = np.asarray(rollouts.rewards, np.float64), batch.response_lengths, sampling["max_tokens"]
        given = shaped(scores, lengths, int(most), self.options, self._moments, control)
        samples, entropy, mismatch = self._judged(batch, given.rewards)
        found = estimated(samples, self.options, self._kl_coef, self.config.gamma, self.config.lambd, control)
        old = None if entropy is None else samples.logprobs  # None: the sampler's stand in
        whole = batch.replace(advantages=found.advantages, old_logprobs=old, ref_logprobs=samples.ref_logprobs)
        made = Experience(
            batch=whole,
            prompts=tuple(rollouts.prompts[int(number)] for number in rollouts.group),
            texts=rollouts.texts,
            token_rewards=found.token_rewards,
            kl=found.kl,
            values=samples.values,
            returns=found.returns if self.critic is not None else None,
            entropy=entropy,
            info=experience_metrics.of_sequences(samples, found, given, whole, entropy),
            components={name: np.asarray(values, np.float64) for name, values in rollouts.components.items()},
        )
        columns = experience_metrics.columns(made, rollouts, found, self.options)
        failures, rows = self._rewards.failures.told(self.strategy)
        self.metrics = (
            numbers
            | failures
            | experience_metrics.over_ranks(columns, rollouts.components, mismatch, control)
            | ({"reward_failed_rows": rows} if rows else {})
        )
        self._moments, self._groups = given.moments, self._groups + groups
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
        """Score `n` samples of each of this rank's prompts, which may be none; no running moment moves.

        Returns, over all ranks, `reward`, `reward_std`, `response_length…`, `truncated`, `samples`, and each
        component's `{name}_mean` and `{name}_std`.
        """
        sampling = sampling_of(self.config, n, generate_kwargs)
        control = self.strategy.control
        prompts = agreed(control, "the prompts", lambda: prompts_of(all_prompts, all_labels, all_references))
        scored = self._scored(prompts, sampling)
        return experience_metrics.evaluation(scored, control) | self._rewards.failures.told(self.strategy)[0]

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

    def _scored(self, prompts: list[Prompt], sampling: Mapping[str, Any]) -> Rollouts:
        """Generate, and score what came."""
        control = self.strategy.control
        chat, drawn_by = split_chat(sampling)
        ids = agreed(control, "the prompts", lambda: encoded(prompts, self.tokenizer, self.prompt_max_len, chat))
        self._tell_begun([prompt.content for prompt in prompts])
        outputs = self.strategy.gather_and_generate(
            dict(sampling), all_prompts=prompts, sleep_engine=self.options.enable_engine_sleep
        )
        rollouts = agreed(control, "generation", lambda: rollouts_of(prompts, ids, outputs, drawn_by))
        return self._rewards.score(rollouts, self._models, self.tokenizer, control)

    def _tell_begun(self, contents: Sequence[Any]) -> None:
        """Say once that texts begin with what the tokenizer puts before them."""
        texts = not self._begun and any(isinstance(content, str) for content in contents)
        if texts and (note := begun_note(contents, begin_text(self.tokenizer))):
            self._begun = True
            self.strategy.print(note)

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
            **media_of(rollouts),
            routing=rollouts.routing,
        )
        return batch, sum(counts)

    def _judged(self, batch: TrainBatch, rewards: np.ndarray) -> tuple[Samples, np.ndarray | None, MismatchMoments]:
        """Ask the actor, the reference and the critic, one after the other; None: entropies were not computed."""
        logprobs, entropy, some, doing = batch.sampler_logprobs, None, batch, "the actor's log-probs"
        replay = self.strategy.router_replay
        if self.config.old_logprobs == "recompute":
            logprobs, entropy = self._models.policy_stats(self.actor, batch, doing, replay)
            own = logprobs
        else:  # the first micro-batch tells how far sampler and trainer are apart; the rest is not computed
            some = batch.rows(np.arange(min(len(batch), self.options.micro_rollout_batch_size)))
            own = self._models.policy_stats(self.actor, some, doing, replay)[0]
        rows = Samples(some.responses, some.mask, rewards, some.group, own)
        mismatch = MismatchMoments.of(*map(rows.padded, (own, some.sampler_logprobs, some.mask)))
        ref = self._models.reference_logprobs(self.initial_model, batch) if self._needs_reference else None
        values = None if self.critic is None else self._models.values(self.critic, batch)
        check_stop(self.strategy.control, "making experience")
        group = batch.group.astype(np.int64)
        return Samples(batch.responses, batch.mask, rewards, group, logprobs, ref, values), entropy, mismatch

    @property
    def _kl_coef(self) -> float:
        """The weight of the KL now."""
        if self.kl_ctl is None:
            return self.config.kl_coef
        return float(getattr(self.kl_ctl, "coef", self.kl_ctl))

    @property
    def _needs_reference(self) -> bool:
        return self._kl_coef > 0 or self.options.use_kl_loss
