"""The reference system's name of `rlbench.trainers.spmd_ppo_trainer`."""

from rlbench.trainers.spmd_ppo_trainer import SPMDPPOTrainer, SPMDPPOTrainerBase

__all__ = ["SPMDPPOTrainer", "SPMDPPOTrainerBase"]
