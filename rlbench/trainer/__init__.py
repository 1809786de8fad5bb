"""The reference system's name of the part of `rlbench.trainers` that is its own."""

from rlbench.trainer.spmd_ppo_trainer import SPMDPPOTrainer, SPMDPPOTrainerBase, SPMDPPOTrainerVL

__all__ = ["SPMDPPOTrainer", "SPMDPPOTrainerBase", "SPMDPPOTrainerVL"]
