"""Dynamic sampling (DAPO, arXiv 2503.14476): groups whose samples are all worth the same are replaced by further ones.

All ranks decide alike what is asked next, and each ends with as many groups as it began with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlbench.data import join
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.errors import DataError, nearest
from rlbench.rl import groups_with_signal
from rlbench.strategies.options.config import StrategyConfig
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.trainers.experience.over_ranks import agreed
from rlbench.trainers.experience.samples import counted, prompts_of
from rlbench.user_code import user_code

REWARD = "reward"
Draw = Callable[[list[Prompt]], Rollouts]
MorePrompts = Callable[[int], Sequence[Any]]


def with_signal(
    draw: Draw, prompts: list[Prompt], more_prompts: MorePrompts, options: StrategyConfig, control: ControlGroup
) -> tuple[Rollouts, dict[str, float]]:
    """Draw until all ranks together have a group with a signal for each of their prompts; collective.

    Gives this rank's scored groups, and metrics: calls of the engine, groups drawn, those whose samples differ, ….
    """
    shares = control.gather(len(prompts))
    wanted = sum(shares)
    kept: list[Rollouts] = []
    asked, generations, groups, found = prompts, 0, 0, 0
    while True:
        drawn = draw(asked)
        kept.append(agreed(control, "dynamic sampling", lambda d=drawn: _kept(d, options)))  # type: ignore[misc]
        counts = control.gather((len(asked), len(np.unique(kept[-1].group))))
        generations += 1
        groups, found = groups + sum(count[0] for count in counts), found + sum(count[1] for count in counts)
        if found >= wanted:
            break
        if generations == options.max_num_gen_batches:
            raise DataError(
                f"dynamic sampling: after {generations} generations {found} of {groups} groups have samples that "
                f"differ in {options.dynamic_sampling_metric!r}, and {wanted} are wanted: give prompts neither too "
                "easy nor too hard, or raise max_num_gen_batches"
            )
        asked = _further(more_prompts, _count(wanted - found, found / groups, shares), control)
    mine = _shared_out(join(*kept) if len(kept) > 1 else kept[0], shares, control)
    counts_of_all = {"generations": generations, "groups": groups, "with_signal": found, "spare": found - wanted}
    numbers = {**counts_of_all, "signal_frac": found / groups}
    return mine, {f"dynamic_sampling/{name}": float(number) for name, number in numbers.items()}


def _count(lacking: int, share: float, shares: Sequence[int]) -> int:
    """Return how many prompts each rank asks next to fill the gap, judging by those before; at most as at first."""
    expected = math.ceil(lacking / share) if share else max(shares) * len(shares)
    return max(1, min(max(shares), math.ceil(expected / len(shares))))


def _further(more_prompts: MorePrompts, count: int, control: ControlGroup) -> list[Prompt]:
    with control.ended_together("dynamic sampling"), user_code():
        given = list(more_prompts(count))
        if len(given) != count:
            raise DataError(f"dynamic sampling: {count} further prompts were wanted, more_prompts gave {len(given)}")
        return prompts_of(given, None, None)


def _kept(drawn: Rollouts, options: StrategyConfig) -> Rollouts:
    """Return the groups that teach something, whole; the samples in a group that count decide it."""
    rows = counted(drawn)
    if not rows.any():  # all cut: nothing was scored, so there are no components either
        return drawn.select(rows)
    metric, others = options.dynamic_sampling_metric, {n: c for n, c in drawn.components.items() if n != REWARD}
    columns = {REWARD: drawn.rewards, **others}  # the shaped reward, whatever a component is called
    if metric not in columns:
        raise DataError(
            f"dynamic_sampling_metric={metric!r} is no component of the rewards{nearest(metric, columns)}; there are "
            f"{', '.join(columns)}"
        )
    values = np.asarray(columns[metric], np.float64)
    group = drawn.group[rows].astype(np.int64)
    differ = groups_with_signal(torch.from_numpy(values[rows]), torch.from_numpy(group)).numpy()
    return drawn.select(np.isin(drawn.group, group[differ]))


def _shared_out(mine: Rollouts, shares: Sequence[int], control: ControlGroup) -> Rollouts:
    """Give each rank its share of groups: the first of its own, then what other ranks have too many; collective."""
    own = np.unique(mine.group)
    share = shares[control.rank]
    lacks = [max(0, want - have) for want, have in zip(shares, control.gather(len(own)), strict=True)]
    chosen = mine.select(np.isin(mine.group, own[:share]))
    if not any(lacks):
        return chosen
    spare = [mine.select(mine.group == group) for group in own[share : share + sum(lacks)]]
    offered = [one for part in control.gather(spare) for one in part]
    start = sum(lacks[: control.rank])
    taken = offered[start : start + lacks[control.rank]]
    return join(chosen, *taken) if taken else chosen
