"""What a whole recipe does on the ranks. Names come on first use: torch is imported with the first of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbench.lazy import lazy_names

if TYPE_CHECKING:
    from rlbench.trainers.experience import Experience
    from rlbench.trainers.experience_maker import FastExperienceMaker
    from rlbench.trainers.ppo_config import PPOConfig
    from rlbench.trainers.ppo_trainer import PPOTrainer
    from rlbench.trainers.replay_buffer import NaiveReplayBuffer
    from rlbench.trainers.reward_heads import make_reward_model
    from rlbench.trainers.spmd_ppo_trainer import SPMDPPOTrainer, SPMDPPOTrainerBase
    from rlbench.trainers.trajectory_saver import TrajectorySaver
    from rlbench.trainers.value_model import make_critic

_NAMES = {
    "Experience": "experience",
    "FastExperienceMaker": "experience_maker",
    "NaiveReplayBuffer": "replay_buffer",
    "PPOConfig": "ppo_config",
    "PPOTrainer": "ppo_trainer",
    "SPMDPPOTrainer": "spmd_ppo_trainer",
    "SPMDPPOTrainerBase": "spmd_ppo_trainer",
    "TrajectorySaver": "trajectory_saver",
    "make_critic": "value_model",
    "make_reward_model": "reward_heads",
}

__all__ = [
    "Experience",
    "FastExperienceMaker",
    "NaiveReplayBuffer",
    "PPOConfig",
    "PPOTrainer",
    "SPMDPPOTrainer",
    "SPMDPPOTrainerBase",
    "TrajectorySaver",
    "make_critic",
    "make_reward_model",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
