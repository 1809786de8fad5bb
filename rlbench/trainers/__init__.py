"""What a whole recipe does on the ranks. Names come on first use: torch is imported with the first of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbench.lazy import lazy_names

if TYPE_CHECKING:
    from rlbench.trainers.experience.maker import FastExperienceMaker as FastExperienceMaker
    from rlbench.trainers.experience.replay_buffer import NaiveReplayBuffer as NaiveReplayBuffer
    from rlbench.trainers.experience.values import Experience as Experience
    from rlbench.trainers.models.reward_heads import make_reward_model as make_reward_model
    from rlbench.trainers.models.value_model import make_critic as make_critic
    from rlbench.trainers.options.ppo_config import PPOConfig as PPOConfig
    from rlbench.trainers.ppo.spmd_trainer import SPMDPPOTrainer as SPMDPPOTrainer
    from rlbench.trainers.ppo.spmd_trainer import SPMDPPOTrainerBase as SPMDPPOTrainerBase
    from rlbench.trainers.ppo.trainer import PPOTrainer as PPOTrainer
    from rlbench.trainers.reports.trajectory_saver import TrajectorySaver as TrajectorySaver
    from rlbench.trainers.texts.trainer import SPMDTextTrainer as SPMDTextTrainer

_NAMES = {
    "Experience": "experience.values",
    "FastExperienceMaker": "experience.maker",
    "NaiveReplayBuffer": "experience.replay_buffer",
    "PPOConfig": "options.ppo_config",
    "PPOTrainer": "ppo.trainer",
    "SPMDPPOTrainer": "ppo.spmd_trainer",
    "SPMDPPOTrainerBase": "ppo.spmd_trainer",
    "SPMDTextTrainer": "texts.trainer",
    "TrajectorySaver": "reports.trajectory_saver",
    "make_critic": "models.value_model",
    "make_reward_model": "models.reward_heads",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
