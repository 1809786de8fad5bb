"""How a completion gets a number: rules, mathematics, models, services, and rewards made of them.

reward = rewards.weighted({"format": (rewards.tags("answer"), 0.2), "answer": (rewards.math(), 0.8)})
"""

from rlbench.rewards.kinds import Board, Failure, Reward, Scorer
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
