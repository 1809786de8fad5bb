"""Evaluation: how good the policy is on prompts it is not trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlbench.data import Rollouts
from rlbench.dispatch.chain import Steps
from rlbench.engines import InferenceEngine


@dataclass(frozen=True)
class Evaluation:
    """Mean reward over all completions, with the scored rollouts behind it."""

    reward: float
    rollouts: Rollouts

    def __float__(self) -> float:
        return self.reward

    def __repr__(self) -> str:
        return f"Evaluation(reward {self.reward:.3g} over {self.rollouts.samples} completions)"


def evaluate_steps(
    inference: InferenceEngine, prompts: Any, reward: Any, n: int, sampling: dict[str, Any], progress: bool
) -> Steps:
    """Generate and score; does not touch the session's rollout counter, so evaluating changes no later sample."""
    rollouts = yield inference.submit_generate(prompts, sampling, n=n, progress=progress, number=0)
    scored = rollouts.score(reward)
    return Evaluation(float(scored.rewards.mean()), scored)
