"""What an evaluation found: how good the policy is on prompts it is not trained on, and how sure that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlbench.data import Prompt, Rollouts
from rlbench.data.base.drawing import needed
from rlbench.data.record.origin import makers
from rlbench.data.rollouts.rollout import Rollout
from rlbench.engines.turns import failed_in_env
from rlbench.errors import DataError, Suggesting, nearest
from rlbench.session.training.statistics import Paired, majority_at, mean_interval, paired, pass_at
from rlbench.units import format_number

Answer = Callable[[Rollout], Hashable]
"""What a completion answers, for a vote; None: nothing."""


@dataclass(frozen=True, eq=False)
class Item:
    """One prompt of an evaluation: its place, the rows of `rollouts.flat` that count, and their rewards, float64."""

    prompt: Prompt
    index: int
    rows: np.ndarray
    rewards: np.ndarray


@dataclass(frozen=True, eq=False)
class Compared(Suggesting):
    """Two evaluations of the same prompts. `paired` has the difference, its interval and p-value; `gained` and `lost`
    are the prompts, by place, whose mean reward rose or fell."""

    before: Evaluation
    after: Evaluation
    paired: Paired
    gained: tuple[int, ...]
    lost: tuple[int, ...]

    def rollouts(self, prompts: Sequence[int] | None = None, after: bool = True) -> Rollouts:
        """Return the completions of these prompts (default: those that changed) after, or before, to look at."""
        chosen = sorted((*self.gained, *self.lost)) if prompts is None else [int(p) for p in prompts]
        return (self.after if after else self.before).rollouts[chosen]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        low, high, p = self.paired.low, self.paired.high, self.paired.p_value
        moved = f"{len(self.gained)} prompts better, {len(self.lost)} worse"
        versions = " -> ".join("several" if e.version is None else f"v{e.version}" for e in (self.before, self.after))
        difference = f"{self.paired.difference:+.3g} [{low:+.3g}, {high:+.3g}] (95 %), p = {p:.2g}"
        return f"Compared({versions}: reward {difference}; {moved})"


@dataclass(frozen=True)
class Evaluation(Suggesting):
    """Mean reward over the completions that count, with the scored rollouts behind it; `name`: of the set of prompts.

    Those do not count that the environment's errors ended, that were cut by a stop, or that have no reward.
    """

    reward: float
    rollouts: Rollouts
    name: str = ""

    def __float__(self) -> float:
        return self.reward

    @property
    def counted(self) -> np.ndarray:
        """(N,) bool: the completions that the mean is over, in `.flat` order."""
        rewards = np.asarray(self.rollouts.rewards, np.float64)
        return np.isfinite(rewards) & ~self.rollouts.aborted & ~failed_in_env(self.rollouts)

    def __repr__(self) -> str:
        missing = self.left_out()
        said = f"; left out: {missing}" if missing else ""
        reward = format_number(self.reward)
        name = f"{self.name!r}: " if self.name else ""
        line = f"Evaluation({name}reward {reward} over {int(self.counted.sum())} completions{said})"
        return "\n  ".join([line, *self.rollouts.notes])

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """The prompts of which a completion counts, in order, with the numbers of those."""
        groups, counted = self.rollouts.group, np.flatnonzero(self.counted)
        rows = {int(p): counted[groups[counted] == p] for p in np.unique(groups[counted])}
        rewards = np.asarray(self.rollouts.rewards, np.float64)
        return tuple(Item(self.rollouts.prompts[p], p, chosen, rewards[chosen]) for p, chosen in rows.items())

    @property
    def version(self) -> int | None:
        """The version of the weights that answered; None where there were several."""
        return self.rollouts.weight_version

    @property
    def interval(self) -> tuple[float, float]:
        """A 95 % interval of the mean over prompts, whose completions are not independent (arXiv 2411.00640)."""
        return mean_interval([item.rewards for item in self.items])

    def pass_at(self, k: int, at: float = 1.0) -> float:
        """Return the chance that one of `k` completions of a prompt has a reward of `at` or more, without bias from
        the `n` there are (arXiv 2107.03374)."""
        return float(pass_at(k, [item.rewards for item in self.items], at).mean())

    def majority_at(self, k: int, answer: Answer | None = None, at: float = 1.0) -> float:
        """Return the share of prompts whose most frequent answer among the first `k` completions is right.

        Args:
            answer: what a completion answers, None for no vote; default: the reward's own `answer`, where it has one
                (`rb.rewards.math` has), else what the policy said in its last turn.
            at: an answer is right where the mean reward of its completions is at least that.
        """
        return float(majority_at(k, [item.rewards for item in self.items], self._answers(answer), at).mean())

    @property
    def tries(self) -> int:
        """Completions that count of each prompt, of that with the fewest: the most that `pass_at` can be asked."""
        return min(len(item.rows) for item in self.items)

    def metrics(self) -> dict[str, float]:
        """The numbers that the history and trackers get: `eval/<set>/reward`, and of several completions of a prompt
        `pass@k` and `maj@k` of all of them."""
        found, k = {"reward": self.reward}, self.tries
        if k > 1:
            found |= {f"pass@{k}": self.pass_at(k), f"maj@{k}": self.majority_at(k)}
        return {"/".join(filter(None, ("eval", self.name, metric))): value for metric, value in found.items()}

    def samples(self) -> dict[str, Rollouts]:
        """What trackers get some rows of, by the table's name."""
        return {"/".join(filter(None, ("eval", self.name, "samples"))): self.rollouts}

    def table(self, answer: Answer | None = None, at: float = 1.0) -> Any:
        """Return a pandas data frame with a row per prompt: `prompt`, `label`, mean `reward`, how many of its
        `completions` are `right` (a reward of `at` or more), its most frequent `answer` (as in `majority_at`)."""
        rows = [
            {
                "prompt": item.prompt.text,
                "label": item.prompt.label,
                "reward": float(item.rewards.mean()),
                "right": int(np.sum(item.rewards >= at)),
                "completions": len(item.rows),
                "answer": _most_frequent(answers),
            }
            for item, answers in zip(self.items, self._answers(answer), strict=True)
        ]
        frame = needed("pandas", "evaluation.table()").DataFrame
        return frame(rows, index=[item.index for item in self.items])

    def _answers(self, answer: Answer | None) -> list[list[Hashable]]:
        """Return what the completions of each item answer."""
        own: Answer = getattr(makers(self.rollouts).get("reward"), "answer", None) or _text
        flat = list(self.rollouts.flat)
        return [[(answer or own)(flat[row]) for row in item.rows] for item in self.items]

    def compare(self, after: Evaluation) -> Compared:
        """Compare with a later evaluation of the same prompts, prompt by prompt: how much better, by chance or not,
        and on which prompts."""
        mine, theirs = {item.index: item for item in self.items}, {item.index: item for item in after.items}
        asked = [[(p.content, p.media) for p in own.rollouts.prompts] for own in (self, after)]
        if asked[0] != asked[1]:
            raise DataError("the two evaluations are not of the same prompts in the same order, so cannot be paired")
        both = sorted(mine.keys() & theirs.keys())
        if not both:
            raise DataError("no prompt has completions that count in both evaluations")
        found = paired([mine[p].rewards for p in both], [theirs[p].rewards for p in both])
        gained, lost = ([both[i] for i in side] for side in (found.gained, found.lost))
        return Compared(self, after, found, tuple(gained), tuple(lost))

    def left_out(self) -> str:
        """How many completions do not count, and why; empty where all do."""
        failed = failed_in_env(self.rollouts)
        cut = self.rollouts.aborted & ~failed
        reasons = {
            "ended by an error of the environment": failed,
            "cut by a stop": cut,
            "without a reward": ~(failed | cut | self.counted),
        }
        return ", ".join(f"{int(rows.sum())} {why}" for why, rows in reasons.items() if rows.any())


class Evaluations(Suggesting, Mapping[str, Evaluation]):
    """What one call of `evaluate` found on several sets of prompts, by their names."""

    def __init__(self, found: Mapping[str, Evaluation]) -> None:
        self._found = dict(found)

    def __getitem__(self, name: str) -> Evaluation:
        if name not in self._found:
            raise KeyError(f"no set {name!r} was evaluated{nearest(name, self._found)}; there are {', '.join(self)}")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def metrics(self) -> dict[str, float]:
        """The numbers of all sets, see `Evaluation.metrics`."""
        return {name: value for one in self.values() for name, value in one.metrics().items()}

    def samples(self) -> dict[str, Rollouts]:
        """Those of all sets, see `Evaluation.samples`."""
        return {name: rollouts for one in self.values() for name, rollouts in one.samples().items()}

    def compare(self, after: Mapping[str, Evaluation]) -> dict[str, Compared]:
        """Compare with a later evaluation, set by set, see `Evaluation.compare`; of the sets that both have."""
        both = [name for name in self if name in after]
        if not both:
            raise DataError(f"the two evaluations have no set in common: {', '.join(self)}; {', '.join(after)}")
        return {name: self[name].compare(after[name]) for name in both}

    def __repr__(self) -> str:
        return "\n".join(["Evaluations", *(f"  {one!r}" for one in self.values())])


def _text(rollout: Rollout) -> str:
    return rollout.answer.strip()


def _most_frequent(answers: Sequence[Hashable]) -> Hashable:
    given = [answer for answer in answers if answer is not None]
    return Counter(given).most_common(1)[0][0] if given else None
