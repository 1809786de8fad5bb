"""Rollouts: what a policy answered, by prompt; scoring and batching give new values, the samples never change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlbench.data.base.column import Column
from rlbench.data.base.ragged import Ragged, chosen_rows
from rlbench.data.batches.batch import TrainBatch
from rlbench.data.prompts.images import PlacedImage
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.prompts.sampling import notes_of
from rlbench.data.record.origin import keeps_makers, latest, made_with, sampler_of
from rlbench.data.rollouts import batching, scoring, taking
from rlbench.data.rollouts import channels as channel_values
from rlbench.data.rollouts.branches import Branch, branches
from rlbench.data.rollouts.jobs import FINISH_REASONS, GeneratedArrays
from rlbench.data.rollouts.merging import merged
from rlbench.data.rollouts.rollout import PromptGroup, Rollout, completions
from rlbench.data.rollouts.turns import EnvError, env_errors
from rlbench.errors import DataError, Suggesting
from rlbench.units import format_number, format_percent

if TYPE_CHECKING:
    from rlbench.data.forking import Named
    from rlbench.data.record.metrics import Metrics
    from rlbench.data.rollouts.comparing import RewardComparison


@dataclass(frozen=True, eq=False)
class Rollouts(Suggesting):
    """P prompts and N samples, prompt-major, as arrays.

    `responses`: sampled token ids; `logprobs`: flat float32 beside them; `group` (N,) int32: the prompt of each
    sample; `finish` (N,) int8 into FINISH_REASONS; `versions` (N,) int64; `rewards` (N,) float64 once scored.
    `channels`: more numbers per token, flat float32 beside `logprobs`, NaN where not known (see `with_batch`).
    `columns`: what a batch of them takes along beside, (tokens, K): a teacher's likeliest tokens.
    `tokenizer`: its folder or hub id, "" where not known. `components`: {name: (N,) float64} that the rewards were made
    of, NaN where one does not apply; `reward_seconds` (N,); `reward_errors`: why some have none (NaN).
    `texts`: each completion's whole text, what an environment said too: the `transcript` of one in `.flat`, whose
    `text`, `turns` and `answer` are what the policy itself said.
    `mask`, `turns`, `turn_rewards`, `env_rewards` and `infos` where there was an environment: see `rollouts.turns`.
    `observed_images`: those that it showed, of each sample, by their places; () where it showed none.
    `routing`: the experts that each token of prompt and response took, where the engine gives them
    (`data.base.routing`).
    `notes`: what a reader has to know of how they were drawn, one sentence each.
    """

    _ELSEWHERE: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("token_ids", "text", "finish_reason", "outputs", "index", "info", "prompt", "label"),
        "rollouts are prompts in order (len counts them); .flat gives all completions one by one, rollouts[i].outputs "
        "those of one prompt, and .responses, .texts, .logprobs, .rewards are columns over all",
    ) | {
        "groups": "they are groups: for group in rollouts, rollouts[0]",
        "head": "rollouts[:8] are the first prompts",
        "reward": "rewards, one per completion, once scored",
        "map": "one value per completion: [f(one) for one in rollouts.flat]",
        "groupby": "they are grouped by prompt: for group in rollouts; by anything else: to_pandas().groupby(…)",
        "advantages": "rollouts.batch(advantage=…) has them, and rollouts.with_batch(batch).channels",
        "to_dataset": "to_parquet(path), which any tool reads, or to_pandas()",
    }

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
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    tokenizer: str = ""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    reward_seconds: np.ndarray | None = None
    reward_errors: scoring.RewardErrors = field(default_factory=scoring.RewardErrors)
    mask: np.ndarray | None = None
    turns: np.ndarray | None = None
    turn_rewards: Ragged | None = None
    env_rewards: np.ndarray | None = None
    infos: tuple[Mapping[str, Any], ...] = ()
    observed_images: tuple[tuple[PlacedImage, ...], ...] = ()
    notes: tuple[str, ...] = ()
    routing: Ragged | None = None

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

    def __getitem__(self, index: int | slice | Sequence[int] | np.ndarray) -> Any:
        """An integer gives a `PromptGroup`; a slice, several integers or a boolean for each prompt the `Rollouts` of
        those prompts; a boolean for each completion those completions, as `select` does."""
        if isinstance(index, slice):
            return taking.of_prompts(self, np.arange(len(self.prompts))[index])
        if not isinstance(index, int | np.integer):
            chosen = np.asarray(index, None if len(index) else np.int64)
            if chosen.dtype == bool and chosen.shape != (len(self),):
                return self.select(chosen)
            return taking.of_prompts(self, np.arange(len(self.prompts))[chosen])
        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        return self._group(int(index) % len(self))

    @property
    def flat(self) -> Iterator[Rollout]:
        """All completions, prompt by prompt."""
        return completions(self, 0, self.samples)

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

    def select(self, keep: np.ndarray | Sequence[int] | Callable[[Rollout], bool]) -> Rollouts:
        """The samples for which `keep` holds: (N,) booleans, a function of a `Rollout`, or their numbers; prompts
        stay."""
        return taking.samples(self, chosen_rows(keep, self.samples, lambda: self.flat))

    filter = select

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

        `.partial` of the DataError (a reward raised, took too long or was no finite number) or of `Stopped` holds the
        completions that have a reward.
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
            rewards: by name, the first is the baseline. Each is what `score` takes, or the name of one of `components`,
                or "rewards", which these rollouts have. Of one alone, those they have are "old".
            concurrency, timeout_s, isolate, memory_gib: as in `score`, for each that is a function.
        """
        from rlbench.data.rollouts import comparing

        options = {"concurrency": concurrency, "timeout_s": timeout_s, "isolate": isolate, "memory_gib": memory_gib}
        return comparing.compare(self, rewards, options)

    def batch(
        self, advantage: Callable[..., Any] | None = None, drop_aborted: bool = True, **columns: Any
    ) -> TrainBatch:
        """Turn scored rollouts into a batch to train on.

        Args:
            advantage: None: advantages of 0, and no reward is needed, for a loss that reads neither, as a teacher's
                (one that does is refused such a batch);
                else `(rewards (B,) float64 tensor, group (B,) int64 tensor) -> (B,)` advantages, or one per token
                (B, T); e.g. `rb.rl.group_normalized()`. It may ask for more by name: `data.rollouts.advantage_call`.
            drop_aborted: leave out completions that an interrupt cut short.
            columns: what it asks for and rollouts do not know: `components={name: rewards}`, `baseline_rewards`, and
                per response token `token_rewards`, `values`, `ref_logprobs`, `teacher_logprobs`, `turns`, ….
        """
        return batching.batch(self, advantage, drop_aborted, columns)

    def fork(
        self,
        sample: int | Sequence[int],
        at: int | Sequence[int],
        n: int = 16,
        text: str | Sequence[int] | None = None,
        under: Named | str | None = None,
        **sampling: Any,
    ) -> Rollouts:
        """Continue completions from one of their tokens: these rollouts with `n` more for each such place, beside them.

            tree = rollouts.fork(3, at=17)
            batch = tree.batch(advantage=rb.rl.branch_values())

        The engine that drew them continues them, with the weights it has now; an environment is not met again. What is
        new is scored by the function that these were scored by; without one the result is not scored. `.branches` says
        what came of each place. Numbers of completions of later prompts move.

        Args:
            sample: number of the completion in `.flat` order; several, with one `at` each or one for all.
            at: response tokens that are kept; below 0: counted from the end.
            text: written behind those (text or token ids), and never trained on.
            under: whose weights continue: a snapshot, or its label (`"before step 3"`); or, of a session with
                `rb.Inference(adapters=2)`, `"base"` or the name of a branch; None: the policy as it is in the engine.
            sampling: `max_tokens` (default: what those of these rollouts leave), `stop`, `ignore_eos`, `seed`, ….

        `.partial` of `Stopped` holds what there is.
        """
        from rlbench.data import forking

        if (sampler := sampler_of(self)) is None:
            raise DataError("fork: no engine of this kernel drew these rollouts: roll out again, or take session.last")
        return forking.fork(self, sample, at, n, text, under, sampling, sampler)

    @property
    def tree(self) -> Rollouts:
        """These rollouts with what was continued from them by clicks in their viewer; themselves where nothing was."""
        return latest(self)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """What came of each `fork`: its completions, their mean reward and its standard error."""
        return branches(self)

    def pairs(self, by: Any = "rewards") -> TrainBatch:
        """Pair each prompt's best completion with its worst: `train_step(rollouts.pairs(), loss=rb.rl.dpo(beta=0.1))`.

        `by`: "rewards", the name of one of `components`, what `score` takes, or one number per completion. Prompts with
        equal scores throughout are left out, and counted in a warning.
        """
        from rlbench.data.rollouts import choosing

        return choosing.best_and_worst(self, by)

    def demonstrations(
        self, best_of: int | None = None, by: Any = "rewards", at_least: float | None = None
    ) -> TrainBatch:
        """Keep the best of each `best_of` completions of a prompt (None: of all) to imitate: `loss="sft"`.

        `by`: as for `pairs`. `at_least`: the lowest score that is worth imitating; None takes the best whatever it is.
        """
        from rlbench.data.rollouts import choosing

        return choosing.best_of(self, by, best_of, at_least)

    @keeps_makers
    def __add__(self, other: Rollouts) -> Rollouts:
        """Both, this one's prompts first; equal prompts stay apart. More: `rlbench.data.join`."""
        from rlbench.data.joining import join

        return join(self, other) if isinstance(other, Rollouts) else NotImplemented

    @keeps_makers
    def with_channels(self, **channels: Any) -> Rollouts:
        """The same rollouts with more numbers per token to look at; one of the same name is replaced.

        By name, flat over all response tokens or one row per completion; standard names: `channels.KNOWN`.
        """
        more = {name: channel_values.as_channel(name, values, self) for name, values in channels.items()}
        return replace(self, channels={**self.channels, **more})

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

        Completions that are not in the batch, as those an interrupt cut, have NaN.
        """
        return replace(self, channels={**self.channels, **channel_values.batch_channels(self, batch, metrics)})

    def to_pandas(self) -> Any:
        """A DataFrame with one row per completion in `.flat` order, each channel as one array per row."""
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

        `colour`: the channel it opens with, else the one that tells most. `samples`: at most, the most telling first.
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

    def _group(self, p: int) -> PromptGroup:
        first, last = np.searchsorted(self.group, [p, p + 1]).tolist()
        return PromptGroup(self.prompts[p], self.prompt_ids[p].tolist(), list(completions(self, first, last)), p)
