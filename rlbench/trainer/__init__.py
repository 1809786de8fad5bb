"""The reference system's name of the part of `rlbench.trainers` that is its own."""

from rlbench.trainer.spmd_ppo_trainer import SPMDPPOTrainer, SPMDPPOTrainerBase

__all__ = ["SPMDPPOTrainer", "SPMDPPOTrainerBase"]
