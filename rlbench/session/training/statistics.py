"""What an evaluation says with so many samples: intervals, pass@k, majority votes, paired differences.

Rewards come by prompt, as a list of arrays: one per prompt, with the rewards of its completions. Prompts are what was
drawn, completions of one prompt are not independent: errors are over prompts (Miller 2024, arXiv 2411.00640).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from rlbench.errors import DataError

Z95 = 1.959964
"""Of a two-sided 95 % interval."""
FLIPS, EXACT = 20_000, 14
"""Sign flips that are drawn where there are more differences than `EXACT`, below which all are tried."""


def mean_interval(by_prompt: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return a 95 % interval of the mean reward over prompts: its standard error is that of the prompts' means."""
    means = np.array([float(np.mean(rewards)) for rewards in by_prompt])
    if len(means) < 2:
        return math.nan, math.nan
    half = Z95 * float(means.std(ddof=1)) / math.sqrt(len(means))
    return float(means.mean()) - half, float(means.mean()) + half


def wilson_interval(right: int, count: int) -> tuple[float, float]:
    """Return a 95 % interval of a share, `right` of `count` independent trials (Wilson 1927)."""
    if not count:
        return math.nan, math.nan
    share, square = right / count, Z95**2 / count
    half = Z95 / math.sqrt(count) * math.sqrt(share * (1 - share) + square / 4)
    return (share + square / 2 - half) / (1 + square), (share + square / 2 + half) / (1 + square)


def pass_at(k: int, by_prompt: Sequence[np.ndarray], at: float = 1.0) -> np.ndarray:
    """Return each prompt's chance that one of k completions has a reward of `at` or more, (P,) float64: without bias
    from n >= k of them, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374)."""
    _need(k, by_prompt)
    chances = []
    for rewards in by_prompt:
        n, right = len(rewards), int(np.sum(np.asarray(rewards) >= at))
        chances.append(1.0 - math.comb(n - right, k) / math.comb(n, k))
    return np.array(chances)


def majority_at(
    k: int, by_prompt: Sequence[np.ndarray], answers: Sequence[Sequence[Hashable]], at: float = 1.0
) -> np.ndarray:
    """Return each prompt's share of votes won by a right answer, (P,) float64: among its first k completions the
    answer given most often (several alike: each in equal parts), right where its completions' mean reward is at least
    `at`. None is no vote. (Wang et al. 2022, arXiv 2203.11171)"""
    _need(k, by_prompt)
    shares = []
    for rewards, given in zip(by_prompt, answers, strict=True):
        votes: dict[Hashable, list[float]] = {}
        for reward, answer in list(zip(rewards, given, strict=True))[:k]:
            if answer is not None:
                votes.setdefault(answer, []).append(float(reward))
        most = max(map(len, votes.values()), default=0)
        best = [np.mean(rewarded) >= at for rewarded in votes.values() if len(rewarded) == most]
        shares.append(float(np.mean(best)) if best else 0.0)
    return np.array(shares)


@dataclass(frozen=True)
class Paired:
    """The same prompts before and after. `difference` of the mean rewards, after - before, with its 95 % interval;
    `p_value`: how often differences as large come of chance alone. `gained`, `lost`: prompts whose mean rose or fell.
    """

    difference: float
    low: float
    high: float
    p_value: float
    gained: tuple[int, ...]
    lost: tuple[int, ...]


def paired(before: Sequence[np.ndarray], after: Sequence[np.ndarray], seed: int = 0) -> Paired:
    """Compare two evaluations of the same prompts, prompt by prompt: a sign-flip permutation test, two-sided, with all
    flips of up to 14 differences that are not 0, else 20,000 that are drawn from `seed`."""
    if len(before) != len(after):
        raise DataError(f"{len(before)} prompts before and {len(after)} after: compare the same ones")
    differences = np.array([float(np.mean(b)) - float(np.mean(a)) for a, b in zip(before, after, strict=True)])
    moved = differences[np.abs(differences) > 1e-12]
    low, high = mean_interval([np.array([difference]) for difference in differences])
    gained, lost = (tuple(np.flatnonzero(sign * differences > 1e-12).tolist()) for sign in (1, -1))
    return Paired(float(differences.mean()), low, high, _flip_p(moved, seed), gained, lost)


def _flip_p(moved: np.ndarray, seed: int) -> float:
    """Return the share of sign flips whose sum is at least as far from 0; one more is counted where they are drawn."""
    if not len(moved):
        return 1.0
    seen = abs(float(moved.sum())) - 1e-9
    if len(moved) <= EXACT:
        bits = np.arange(2 ** len(moved))[:, None] >> np.arange(len(moved)) & 1
        return float(np.mean(np.abs((1.0 - 2.0 * bits) @ moved) >= seen))
    rng = np.random.default_rng(seed)
    count = sum(
        int(np.sum(np.abs(rng.choice([-1.0, 1.0], size=(1000, len(moved))) @ moved) >= seen))
        for _ in range(FLIPS // 1000)
    )
    return (count + 1) / (FLIPS + 1)


def _need(k: int, by_prompt: Sequence[np.ndarray]) -> None:
    fewest = min(map(len, by_prompt), default=0)
    if k < 1 or k > fewest:
        raise DataError(f"k={k} of {fewest} completions that a prompt has: draw more, evaluate(…, n={max(k, 1)})")
