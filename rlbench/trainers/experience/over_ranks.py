"""What the ranks decide and count together: work that ends alike on all of them, means and spreads over all samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from rlbench.dispatch import context
from rlbench.errors import Stopped
from rlbench.rl import RunningMoments
from rlbench.rl.groups import WHITEN_EPS
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.user_code import user_code

T = TypeVar("T")


def agreed(control: ControlGroup, doing: str, work: Callable[[], T]) -> T:
    """Run `work`, which holds no collective, on every rank; a failure or a stop on one ends it on all."""
    failure: Exception | None = None
    stop: KeyboardInterrupt | None = None
    result: Any = None
    try:
        with user_code():
            result = work()
    except KeyboardInterrupt as interrupt:  # a Stopped is one
        stop = interrupt
    except Exception as error:  # whatever it is, the peers must hear of it
        failure = error
    asked = stop is not None or context.current().stop_requested()
    if control.stops(doing, failure, asked):
        raise Stopped(f"{doing} stopped: no experience was made, models and optimizers are untouched") from stop
    return result


def check_stop(control: ControlGroup, doing: str) -> None:
    """End on all ranks together if one was asked to stop; collective."""
    agreed(control, doing, lambda: None)


@dataclass(frozen=True)
class Spread:
    """Mean, deviation and bounds of numbers, which can be added up over ranks; NaN are not counted."""

    moments: RunningMoments = field(default_factory=RunningMoments)
    low: float = float("inf")
    high: float = float("-inf")

    @classmethod
    def of(cls, values: Any) -> Spread:
        """Take in an array of any shape."""
        known = np.asarray(values, np.float64).reshape(-1)
        known = known[~np.isnan(known)]
        if not len(known):
            return cls()
        return cls(RunningMoments().update(torch.from_numpy(known)), float(known.min()), float(known.max()))

    def __add__(self, other: Spread) -> Spread:
        return Spread(self.moments.merge(other.moments), min(self.low, other.low), max(self.high, other.high))

    def numbers(self, name: str, parts: Sequence[str]) -> dict[str, float]:
        """Return `parts` of mean ("" too), std, max, min by their metrics' names; nothing of no values."""
        mean, std = self.moments.mean, self.moments.std
        found = {"": mean, "mean": mean, "std": std, "max": self.high, "min": self.low}
        return {f"{name}_{part}" if part else name: found[part] for part in parts if self.moments.count}


def spreads_over_ranks(own: Mapping[str, Spread], control: ControlGroup) -> dict[str, Spread]:
    """Return each named spread over all ranks, in their order; a rank may lack some. Collective."""
    whole: dict[str, Spread] = {}
    for part in control.gather(dict(own)):
        for name, spread in part.items():
            whole[name] = whole.get(name, Spread()) + spread
    return whole


def moments_over_ranks(values: torch.Tensor, control: ControlGroup) -> RunningMoments:
    """Return count, mean and squares of the values of all ranks; collective."""
    return functools.reduce(RunningMoments.merge, control.gather(RunningMoments().update(values)), RunningMoments())


def whitened(values: torch.Tensor, control: ControlGroup) -> torch.Tensor:
    """Shift and scale (N,) values to mean 0 and unbiased variance 1 over all ranks, float64; 0 where all are equal;
    collective."""
    moments = moments_over_ranks(values, control)
    wide = values.double()
    if moments.std == 0.0:
        return torch.zeros_like(wide)
    return (wide - moments.mean) * float(moments.std**2 + WHITEN_EPS) ** -0.5
