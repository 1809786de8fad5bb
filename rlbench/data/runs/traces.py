"""Runs of agents at an endpoint, and what trains on them: ordinary `Rollouts` with turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlbench.data.record.origin import drawn_by
from rlbench.data.runs.journal import Call
from rlbench.data.runs.rows import rollouts_of
from rlbench.errors import DataError, Suggesting, nearest

if TYPE_CHECKING:
    from rlbench.data.batches.batch import TrainBatch
    from rlbench.data.rollouts.rollouts import Rollouts


@dataclass(frozen=True, eq=False)
class Run(Suggesting):
    """The calls of one run, oldest first: a conversation, or a tree of them where it was branched.

    `group`: runs of one group are compared by an advantage; "" groups by equal first prompts. `label`: of its task.
    `reward`: None where nobody gave one; `error`: why the agent's program failed, "" where it did not.
    """

    name: str
    calls: tuple[Call, ...]
    group: str = ""
    label: Any = None
    reward: float | None = None
    error: str = ""

    @property
    def tokens(self) -> int:
        """How many tokens were sampled in it."""
        return sum(call.tokens for call in self.calls)

    @property
    def versions(self) -> list[int]:
        """The weight versions it was sampled from."""
        return sorted({v for call in self.calls for choice in call.choices for _, v in choice.versions})

    @property
    def differs(self) -> list[Mapping[str, Any]]:
        """Where the client's text of earlier turns encodes otherwise than what was sampled, whose tokens stand."""
        return [call.differs for call in self.calls if call.differs is not None]

    def __repr__(self) -> str:
        parts = [f"{len(self.calls)} calls", f"{self.tokens:,} tokens", f"v{'/'.join(map(str, self.versions))}"]
        parts += [f"reward {self.reward:g}"] if self.reward is not None else []
        return f"Run({self.name!r}, {', '.join(parts)}{', failed: ' + self.error if self.error else ''})"


@dataclass(frozen=True, eq=False)
class Traces(Sequence[Run]):
    """Runs, by the time of their first call. `.rollouts`, `.score` and `.batch` are of those that did not fail.

    `decode`: the text of token ids; `tokenizer`: its folder or hub id; `sampler`: what can continue them, see
    `Rollouts.fork`.
    """

    runs: tuple[Run, ...]
    decode: Callable[[list[int]], str] = field(repr=False)
    tokenizer: str = ""
    sampler: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, calls: Iterable[Call], decode: Callable[[list[int]], str], tokenizer: str, sampler: Any) -> Traces:
        """Put calls in their runs."""
        runs: dict[str, list[Call]] = {}
        for call in sorted(calls, key=lambda one: one.time):
            runs.setdefault(call.run, []).append(call)
        return cls(tuple(Run(name, tuple(own)) for name, own in runs.items()), decode, tokenizer, sampler)

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __getitem__(self, which: Any) -> Any:
        """A number gives a run, a slice `Traces`, a name the run of that name."""
        if isinstance(which, str):
            by_name = {run.name: run for run in self.runs}
            if which not in by_name:
                raise KeyError(f"no run {which!r}{nearest(which, by_name)}")
            return by_name[which]
        return replace(self, runs=self.runs[which]) if isinstance(which, slice) else self.runs[which]

    def select(self, keep: Callable[[Run], bool]) -> Traces:
        """The runs for which `keep` holds: `traces.select(lambda run: run.versions == [session.version])`."""
        return replace(self, runs=tuple(filter(keep, self.runs)))

    @property
    def failed(self) -> Traces:
        """The runs whose program failed; they are not trained on."""
        return self.select(lambda run: bool(run.error))

    @cached_property
    def rollouts(self) -> Rollouts:
        """One completion for each way through a run, from its first prompt to a call that nothing continued; every
        sampled token is trained once. With rewards where all runs have one."""
        kept = [run for run in self.runs if not run.error and run.calls]
        if not kept:
            failed = f": {len(self.failed)} failed, the first: {self.failed[0].error}" if self.failed else ""
            raise DataError(f"no run made a call that could be trained on{failed}")
        rollouts = drawn_by(rollouts_of(kept, self.decode, self.tokenizer), self.sampler)
        rewards = {run.name: run.reward for run in kept if run.reward is not None}
        return rollouts.score(_by_run(rollouts, rewards)) if len(rewards) == len(kept) else rollouts

    def score(self, fn: Any, **options: Any) -> Rollouts:
        """Give runs a reward; returns `Rollouts`.

        Args:
            fn: what `Rollouts.score` takes (`rollout.info["run"]` names the run, `rollout.info["messages"]` is what was
                said), or `{name of a run: reward}`.
            options: of `Rollouts.score`.
        """
        return self.rollouts.score(_by_run(self.rollouts, fn) if isinstance(fn, Mapping) else fn, **options)

    def batch(self, advantage: Callable[..., Any] | None = None, **options: Any) -> TrainBatch:
        """`self.rollouts.batch(…)`, for runs that have rewards."""
        return self.rollouts.batch(advantage, **options)

    def __repr__(self) -> str:
        calls = sum(len(run.calls) for run in self.runs)
        failed = f", {len(self.failed)} failed" if len(self.failed) else ""
        tokens = sum(run.tokens for run in self.runs)
        return f"Traces({len(self)} runs, {calls} calls, {tokens:,} tokens{failed})"


def _by_run(rollouts: Rollouts, rewards: Mapping[str, float]) -> list[float]:
    names = [str(info["run"]) for info in rollouts.infos]
    if missing := sorted(set(names) - set(rewards)):
        raise DataError(f"no reward is given for {len(missing)} of the runs, the first: {missing[0]!r}")
    return [float(rewards[name]) for name in names]
