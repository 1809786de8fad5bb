"""How a completion gets a number: rules, mathematics, models, services, and rewards made of them.

    from rlbench import rewards

    reward = rewards.weighted({"format": (rewards.tags("think", "answer"), 0.2), "answer": (rewards.math(), 0.8)})
    scored = rollouts.score(reward)
    scored.components["answer"]

All are values: they can be shown, pickled, put into one another, and called with one `Rollout`.
"""

from rlbench.rewards.board import Board, Failure, Reward
from rlbench.rewards.kinds import Scorer
from rlbench.rewards.math_check import math
from rlbench.rewards.mixing import mixture, weighted
from rlbench.rewards.reward_model import model
from rlbench.rewards.rules import contains, exact, regex, tags
from rlbench.rewards.running import batched, function
from rlbench.rewards.service import remote

__all__ = [
    "Board",
    "Failure",
    "Reward",
    "Scorer",
    "batched",
    "contains",
    "exact",
    "function",
    "math",
    "mixture",
    "model",
    "regex",
    "remote",
    "tags",
    "weighted",
]
