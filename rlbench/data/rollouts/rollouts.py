"""Rollouts: what a policy answered, by prompt; scoring and batching give new values, the samples never change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlbench.data.base.column import Column
from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.batch import TrainBatch
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.prompts.sampling import notes_of, reshaped_by
from rlbench.data.record.origin import keeps_makers, made_with
from rlbench.data.rollouts import channels as channel_values
from rlbench.data.rollouts import scoring
from rlbench.data.rollouts.advantage_call import call_advantage, given_columns, take_rows
from rlbench.data.rollouts.jobs import FINISH_REASONS, GeneratedArrays
from rlbench.data.rollouts.merging import merged
from rlbench.data.rollouts.rollout import PromptGroup, Rollout
from rlbench.data.rollouts.turns import EnvError, env_errors, sampled_mask
from rlbench.errors import DataError, Suggesting
from rlbench.units import format_number, format_percent

if TYPE_CHECKING:
    from rlbench.data.record.metrics import Metrics
    from rlbench.data.rollouts.comparing import RewardComparison


@dataclass(frozen=True, eq=False)
class Rollouts(Suggesting):
    """P prompts and N samples, prompt-major, as arrays.

    `responses`: sampled token ids; `logprobs`: flat float32 beside them; `group` (N,) int32: the prompt of each
    sample; `finish` (N,) int8 into FINISH_REASONS; `versions` (N,) int64; `rewards` (N,) float64 once scored.
    `channels`: more numbers per token, flat float32 beside `logprobs`, NaN where not known (see `with_batch`).
    `tokenizer`: folder or hub id of the tokenizer the tokens are of; "" where not known.
    `components`: {name: (N,) float64} that the rewards were made of, NaN where one does not apply; `reward_seconds`
    (N,): what scoring each took; `reward_errors`: why some have none (NaN), see `score(on_error="keep")`.
    `mask`, `turns`, `turn_rewards`, `env_rewards` and `infos` where there was an environment: see `turns`.
    `notes`: what a reader has to know of how they were drawn, one sentence each.
    """

    _ELSEWHERE: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("token_ids", "text", "finish_reason", "outputs", "index", "info", "prompt", "label"),
        "rollouts are prompts in order (len counts them); .flat gives all completions one by one, rollouts[i].outputs "
        "those of one prompt, and .responses, .texts, .logprobs, .rewards are columns over all",
    )

    prompts: tuple[Prompt, ...]
    prompt_ids: Ragged
    responses: Ragged
    logprobs: np.ndarray
    group: np.ndarray
    finish: np.ndarray
    versions: np.ndarray
    texts: tuple[str, ...]
    sampling: dict[str, Any]
    rewards: np.ndarray | None = None
    number: int = 0
    not_started: tuple[int, ...] = ()
    stats: dict[str, float] = field(default_factory=dict)
    channels: Mapping[str, np.ndarray] = field(default_factory=dict)
    tokenizer: str = ""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    reward_seconds: np.ndarray | None = None
    reward_errors: scoring.RewardErrors = field(default_factory=scoring.RewardErrors)
    mask: np.ndarray | None = None
    turns: np.ndarray | None = None
    turn_rewards: Ragged | None = None
    env_rewards: np.ndarray | None = None
    infos: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rewards is not None:  # an array still, and one with `.plot()`
            object.__setattr__(self, "rewards", Column.of(self.rewards, "rewards"))

    @classmethod
    def merge(
        cls,
        prompts: Sequence[Prompt],
        parts: Sequence[GeneratedArrays],
        sampling: dict[str, Any],
        number: int = 0,
        tokenizer: str = "",
    ) -> Rollouts:
        """Join what the replicas returned, in prompt order. Prompts nobody started are listed in `not_started`."""
        whole = cls(sampling=dict(sampling), number=number, tokenizer=tokenizer, **merged(prompts, parts))
        return replace(whole, notes=notes_of(sampling, whole.responses.lengths[whole.truncated], whole.samples))

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def samples(self) -> int:
        """Number of completions, over all prompts."""
        return len(self.responses)

    def __iter__(self) -> Iterator[PromptGroup]:
        return (self._group(i) for i in range(len(self.prompts)))

    def __getitem__(self, index: int | slice) -> Any:
        """An integer gives a `PromptGroup`; a slice gives the `Rollouts` of those prompts."""
        if isinstance(index, slice):
            return self._prompts(np.arange(len(self.prompts))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        return self._group(index % len(self))

    @property
    def flat(self) -> Iterator[Rollout]:
        """All completions, prompt by prompt."""
        return (self._sample(i) for i in range(self.samples))

    @property
    def lengths(self) -> Column:
        """Response lengths in tokens, (N,) int64; `.plot()` draws them."""
        return Column.of(self.responses.lengths, "lengths", "tokens", self.truncated)

    @property
    def truncated(self) -> np.ndarray:
        """(N,) bool: stopped by the length limit."""
        return self.finish == FINISH_REASONS.index("length")

    @property
    def aborted(self) -> np.ndarray:
        """(N,) bool: cut by an interrupt."""
        return self.finish == FINISH_REASONS.index("abort")

    @cached_property
    def env_errors(self) -> list[EnvError]:
        """What an environment's code raised, its tools' too; those with `ended` ended their completion."""
        return env_errors(self.infos)

    @cached_property
    def weight_version(self) -> int | None:
        """The one version all samples were drawn under; None when there are several."""
        versions = np.unique(self.versions)
        return int(versions[0]) if len(versions) == 1 else None

    def select(self, keep: np.ndarray | Callable[[Rollout], bool]) -> Rollouts:
        """The samples for which `keep` (a (N,) bool array, or a function of a `Rollout`) holds; prompts stay."""
        mask = np.array([bool(keep(r)) for r in self.flat]) if callable(keep) else np.asarray(keep, bool)
        if mask.shape != (self.samples,):
            raise DataError(f"select: wanted {self.samples} booleans, got shape {mask.shape}")
        return self._take(np.flatnonzero(mask))

    def score(
        self,
        fn: scoring.RewardFn | Sequence[float] | np.ndarray,
        *,
        concurrency: int | None = None,
        timeout_s: float | None = None,
        isolate: bool = False,
        memory_gib: float | None = None,
        on_error: str = "raise",
    ) -> Rollouts:
        """Give each completion a reward; a new value, so that the same rollouts can be scored again.

        Args:
            fn: a function of one `Rollout`, plain or async, that returns a number, a mapping of numbers with "reward"
                (the others become `components`) or an `rb.rewards.Reward`; a function of many (`rb.rewards.batched`);
                a reward of `rb.rewards`; or one number per completion in `.flat` order.
            concurrency, timeout_s, isolate, memory_gib: see `rb.rewards.function`. What does not apply raises.
            on_error: "raise": when all were tried, raise for those that failed. "keep": their reward is NaN, and
                `reward_errors` says why; `batch` refuses them.

        Raises:
            DataError: a reward raised, took too long or was no finite number: names the first such completion and
                counts the others; `.partial` holds those that have a reward.
            Stopped: interrupted; `.partial` holds the completions that have a reward, None where none has.
        """
        options = {"concurrency": concurrency, "timeout_s": timeout_s, "isolate": isolate, "memory_gib": memory_gib}
        scored = scoring.score(self, fn, on_error, **options)
        return made_with(scored, self, reward=fn if callable(fn) else None)

    def compare(
        self,
        *,
        concurrency: int | None = None,
        timeout_s: float | None = None,
        isolate: bool = False,
        memory_gib: float | None = None,
        **rewards: Any,
    ) -> RewardComparison:
        """Score with several rewards and say where they disagree: `rollouts.compare(old=one, new=another)`.

        Args:
            rewards: by name, the first is what the others are compared with. Each is what `score` takes, or the name of
                one of `components`, or "rewards", which these rollouts have. Of one alone, those they have are "old".
            concurrency, timeout_s, isolate, memory_gib: as in `score`, for each that is a function.
        """
        from rlbench.data.rollouts import comparing

        options = {"concurrency": concurrency, "timeout_s": timeout_s, "isolate": isolate, "memory_gib": memory_gib}
        return comparing.compare(self, rewards, options)

    def batch(self, advantage: Callable[..., Any], drop_aborted: bool = True, **columns: Any) -> TrainBatch:
        """Turn scored rollouts into a batch to train on.

        Args:
            advantage: `(rewards (B,) float64 tensor, group (B,) int64 tensor) -> (B,)` advantages, or one per token
                (B, T); e.g. `rb.rl.group_normalized()`. It may ask for more by name: `data.rollouts.advantage_call`.
            drop_aborted: leave out completions that an interrupt cut short.
            columns: what it asks for and rollouts do not know: `components={name: rewards}` (else those of the
                rewards, without details such as `answer/parsed`), `baseline_rewards`,
                and per response token `token_rewards`, `values`, `ref_logprobs`, `teacher_logprobs`, `turns`, ….
        """
        kept = ~self.aborted if drop_aborted else np.ones(self.samples, bool)
        kept &= self.lengths > 0
        if not kept.any():
            raise DataError("no finished completion is left to train on: roll out again, or batch(drop_aborted=False)")
        rows = np.flatnonzero(kept)
        scoring.check_known(self, rows)
        columns = scoring.with_components(self, advantage, columns, rows)
        chosen = self if kept.all() else self._take(rows)
        given = take_rows(given_columns(self, columns), rows)
        mask = sampled_mask(chosen)
        batch = TrainBatch(
            prompts=chosen.prompt_ids.take(chosen.group),
            responses=chosen.responses,
            mask=mask,
            advantages=call_advantage(advantage, chosen, mask, given),
            sampler_logprobs=chosen.logprobs,
            group=chosen.group,
            weight_version=chosen.versions,
            rewards=np.asarray(chosen.rewards),
            truncated=chosen.truncated,
            temperature=float(self.sampling.get("temperature", 1.0)),
            reshaped_by=reshaped_by(self.sampling),
        )
        return made_with(batch, self, advantage=advantage)

    @keeps_makers
    def __add__(self, other: Rollouts) -> Rollouts:
        """Both, this one's prompts first; equal prompts stay apart. More: `rlbench.data.join`."""
        from rlbench.data.joining import join

        return join(self, other) if isinstance(other, Rollouts) else NotImplemented

    @keeps_makers
    def with_channels(self, **channels: Any) -> Rollouts:
        """The same rollouts with more numbers per token to look at; one of the same name is replaced.

        Args:
            channels: by name, flat over all response tokens or one row per completion (arrays, tensors, lists).
                Standard names, units and colours: `rlbench.data.rollouts.channels.KNOWN`.
        """
        given = {name: channel_values.as_channel(name, values, self) for name, values in channels.items()}
        return replace(self, channels={**self.channels, **given})

    @keeps_makers
    def with_batch(self, batch: TrainBatch, metrics: Metrics | None = None) -> Rollouts:
        """The same rollouts with what a batch made of them, and a step on it, say of each token.

        Args:
            batch: made from these rollouts, all or some of them in any order. Gives `advantage`, `mask` and, where it
                knows them, `old_logprob` and `ref_logprob`.
            metrics: what `train_step` returned for this batch. Gives `trainer_logprob` and `entropy` as they were
                when the step began (nats), from them `difference` (trainer − sampler), `ratio` (to the old policy; to
                the sampler where the old is not known), `ref_kl` (k3, nats) where there is a reference, `clipped`
                where the loss says so, and what else the loss's metrics say per token.

        Returns:
            New rollouts. Completions that are not in the batch, as those an interrupt cut, have NaN.
        """
        return replace(self, channels={**self.channels, **channel_values.batch_channels(self, batch, metrics)})

    def to_pandas(self) -> Any:
        """One row per completion; see `rlbench.data.files.export.frame`."""
        from rlbench.data.files import export

        return export.frame(self)

    def to_parquet(self, path: str | Path) -> Path:
        """Write everything to one Parquet file, one row per completion; `from_parquet` gives equal rollouts back."""
        from rlbench.data.files import export

        return export.write_parquet(self, path)

    @classmethod
    def from_parquet(cls, path: str | Path) -> Rollouts:
        """Read what `to_parquet` wrote. Raises DataError for any other file."""
        from rlbench.data.files import export

        return export.read_parquet(path)

    def to_json(self, path: str | Path) -> Path:
        """Write trajectories as JSON, a completion's turns as messages; see `rlbench.data.files.trajectories`."""
        from rlbench.data.files import trajectories

        return trajectories.write_json(self, path)

    def to_html(self, path: str | Path, colour: str | None = None, samples: int = 200) -> Path:
        """Write a page that needs nothing but itself: groups, and tokens coloured by any channel.

        Args:
            path: of the file.
            colour: the channel it opens with; None takes the one that tells most.
            samples: completions at most, the most telling groups first; the page says how many are left out.

        Returns:
            The path.
        """
        from rlbench.data.base import drawing, files

        page = drawing.drawn("rollouts_page", self, colour=colour, samples=samples)
        return files.write_text(path, page)

    def __repr__(self) -> str:
        parts = [f"{self.samples} rollouts of {len(self)} prompts", f"{int(self.lengths.sum())} tokens"]
        if self.samples:
            parts.append(f"{format_percent(float(self.truncated.mean()))} truncated")
            parts.append("v" + "/".join(str(v) for v in np.unique(self.versions)))
        if self.turn_rewards is not None and self.samples:
            parts.append(f"{format_number(float(self.turn_rewards.lengths.mean()))} turns")
        if self.rewards is not None and self.samples:
            parts.append(scoring.described(self.rewards))
        if self.aborted.any() or self.not_started:
            parts.append(f"{int(self.aborted.sum())} aborted, {len(self.not_started)} prompts not started")
        return "\n  ".join([f"Rollouts({' · '.join(parts)})", *self.notes])

    def _sample(self, i: int) -> Rollout:
        span = slice(int(self.responses.offsets[i]), int(self.responses.offsets[i + 1]))
        return Rollout(
            source=self.prompts[self.group[i]],
            token_ids=self.responses.values[span].tolist(),
            text=self.texts[i],
            logprobs=self.logprobs[span].tolist(),
            finish_reason=FINISH_REASONS[self.finish[i]],
            group=int(self.group[i]),
            index=i,
            weight_version=int(self.versions[i]),
            reward=scoring.known_or_none(self.rewards, i),
            info=self.infos[i] if self.infos else {},
        )

    def _group(self, p: int) -> PromptGroup:
        first, last = np.searchsorted(self.group, [p, p + 1])
        outputs = [self._sample(i) for i in range(int(first), int(last))]
        return PromptGroup(self.prompts[p], self.prompt_ids[p].tolist(), outputs, p)

    @keeps_makers
    def _take(self, rows: np.ndarray) -> Rollouts:
        pick = self.responses.pick
        return replace(
            self,
            responses=self.responses.take(rows),
            logprobs=pick(self.logprobs, rows),
            group=self.group[rows],
            finish=self.finish[rows],
            versions=self.versions[rows],
            texts=tuple(self.texts[i] for i in rows),
            mask=pick(self.mask, rows),
            turns=pick(self.turns, rows),
            turn_rewards=None if self.turn_rewards is None else self.turn_rewards.take(rows),
            env_rewards=None if self.env_rewards is None else self.env_rewards[rows],
            infos=tuple(self.infos[i] for i in rows) if self.infos else (),
            channels={name: pick(values, rows) for name, values in self.channels.items()},
            **scoring.rows_of(self, rows),
        )

    @keeps_makers
    def _prompts(self, chosen: np.ndarray) -> Rollouts:
        where = {int(p): i for i, p in enumerate(chosen)}
        rows = np.concatenate([np.flatnonzero(self.group == p) for p in chosen]) if len(chosen) else np.zeros(0, int)
        taken = self._take(rows)
        return replace(
            taken,
            prompts=tuple(self.prompts[p] for p in chosen),
            prompt_ids=self.prompt_ids.take(chosen),
            group=np.array([where[int(g)] for g in taken.group], np.int32),
            not_started=tuple(where[p] for p in self.not_started if p in where),
        )
