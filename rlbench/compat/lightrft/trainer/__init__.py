"""LightRFT's `trainer`."""

from rlbench.trainers.spmd_ppo_trainer import SPMDPPOTrainer, SPMDPPOTrainerBase, SPMDPPOTrainerVL

__all__ = ["SPMDPPOTrainer", "SPMDPPOTrainerBase", "SPMDPPOTrainerVL"]
