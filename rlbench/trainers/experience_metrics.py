"""Numbers of one making of experience, over all samples of all ranks, under the reference system's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlbench.data.rollouts import Rollouts
from rlbench.rl import MismatchMoments
from rlbench.strategies.control import ControlGroup
from rlbench.trainers.over_ranks import Spread, spreads_over_ranks
from rlbench.trainers.samples import counted

PARTS: Mapping[str, tuple[str, ...]] = {
    "reward": ("",),
    "return": ("",),
    "response_length": ("", "mean", "std"),
    "total_length": ("",),
    "step_reward": ("mean", "std", "max", "min"),
    "advantages": ("mean", "std", "max", "min"),
    "returns": ("mean", "std"),
}
COMPONENT = ("mean", "std")


def over_ranks(
    columns: Mapping[str, Any], components: Mapping[str, np.ndarray], mismatch: MismatchMoments, control: ControlGroup
) -> dict[str, float]:
    """Metrics of all ranks; collective.

    Args:
        columns: numbers of this rank by name; of those in `PARTS` the parts named there are told, of others the mean.
        components: what rewards were made of, by name; details (with a `/`) are left out.
        mismatch: sampler against trainer, summed over this rank's tokens.
        control: the ranks' group.
    """
    own = {f"c/{name}": Spread.of(values) for name, values in components.items() if "/" not in name}
    whole = spreads_over_ranks({name: Spread.of(values) for name, values in columns.items()} | own, control)
    numbers: dict[str, float] = {}
    for name, spread in whole.items():
        component = name.startswith("c/")
        parts = COMPONENT if component else PARTS.get(name, ("",))
        numbers |= spread.numbers(name.removeprefix("c/"), parts)
    total = MismatchMoments()
    for part in control.gather(mismatch):
        total = total + part
    said = total.result() if total.tokens else {}
    return numbers | {f"mismatch/{name}": value for name, value in said.items()}


def evaluation(scored: Rollouts, control: ControlGroup) -> dict[str, float]:
    """Metrics of samples that are not trained on, over all ranks; collective. What does not count is left out."""
    rewards, rows = np.asarray(scored.rewards, np.float64), counted(scored)
    columns = {"reward": rewards, "response_length": scored.lengths[rows], "truncated": scored.truncated[rows]}
    numbers = over_ranks(columns, scored.components, MismatchMoments(), control)
    spread = spreads_over_ranks({"reward": Spread.of(rewards)}, control).get("reward", Spread())
    return numbers | spread.numbers("reward", ("std",)) | {"samples": float(spread.moments.count)}
