"""Rewards that failed while experience was made: allowed for up to a share, counted, and told with the row."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.data.rollouts.scoring import RewardError
from rlbench.errors import RLBenchError
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.trainers.experience.over_ranks import agreed

SHOWN = 3
"""Failures that are told with their rows."""


@dataclass(eq=False)
class RewardFailures:
    """Those of this rank since they were last told. `allowed`: the share of samples over all ranks that may fail."""

    allowed: float
    errors: list[RewardError] = field(default_factory=list)
    groups: int = 0

    def take(self, scored: Rollouts, error: RLBenchError | None, doing: str, control: ControlGroup) -> None:
        """Keep what failed of a source; where that is more than the allowed share, raise `error`. Collective."""
        counts = control.gather((len(scored.reward_errors), scored.samples))
        failed, samples = (sum(column) for column in zip(*counts, strict=True))
        if failed > self.allowed * samples:

            def refuse() -> None:
                if error is not None:
                    raise error

            self.errors, self.groups = [], 0
            agreed(control, doing, refuse)
        self.errors += scored.reward_errors

    def told(self, strategy: StrategyBase) -> tuple[dict[str, float], str]:
        """Print the first of all ranks with their rows, and return the counts and those rows; collective.

        Nothing and "" where none failed.
        """
        parts = strategy.control.gather((len(self.errors), self.groups, self.errors[:SHOWN]))
        self.errors, self.groups = [], 0
        failed, groups = sum(part[0] for part in parts), sum(part[1] for part in parts)
        if not failed:
            return {}, ""
        rows = [f"{error.prompt[:60]!r}: {error.error}" for part in parts for error in part[2]][:SHOWN]
        told = "; ".join(rows)
        strategy.print(f"the reward failed for {failed} samples, whose {groups} groups are left out: {told}")
        return {"reward_failed": float(failed), "groups_left_out": float(groups)}, told
