"""LightRFT's `trainer.spmd_ppo_trainer`: `rlbench.trainers.spmd_ppo_trainer`."""

from rlbench.trainers.spmd_ppo_trainer import SPMDPPOTrainer, SPMDPPOTrainerBase, SPMDPPOTrainerVL

__all__ = ["SPMDPPOTrainer", "SPMDPPOTrainerBase", "SPMDPPOTrainerVL"]
