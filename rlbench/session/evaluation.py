"""Evaluation: how good the policy is on prompts it is not trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlbench.data import Rollouts
from rlbench.dispatch.chain import Steps
from rlbench.engines import InferenceEngine
from rlbench.errors import DataError


@dataclass(frozen=True)
class Evaluation:
    """Mean reward over all completions, with the scored rollouts behind it."""

    reward: float
    rollouts: Rollouts

    def __float__(self) -> float:
        return self.reward

    def __repr__(self) -> str:
        rewards = np.asarray(self.rollouts.rewards)
        return f"Evaluation(reward {self.reward:.3g} over {int(np.isfinite(rewards).sum())} completions)"


def evaluate_steps(
    inference: InferenceEngine, prompts: Any, reward: Any, n: int, sampling: dict[str, Any], progress: bool,
    env: Any = None,
) -> Steps:  # fmt: skip
    """Generate and score; does not touch the session's rollout counter, so evaluating changes no later sample.

    Without `reward` the environment's rewards count; a completion without one (the environment failed, or gave none)
    does not.

    Raises:
        DataError: neither a reward nor an environment that gives one.
    """
    if reward is None and env is None:
        raise DataError("evaluate needs a reward function, or an environment (env=…) that gives rewards")
    rollouts = yield inference.submit_generate(prompts, sampling, n=n, progress=progress, number=0, env=env)
    if reward is not None:
        scored = rollouts.score(reward)
    elif rollouts.rewards is None:
        raise DataError("the environment gave no reward: give evaluate a reward function")
    else:
        scored = rollouts
    return Evaluation(float(np.nanmean(scored.rewards)), scored)
