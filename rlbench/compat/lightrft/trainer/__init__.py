"""LightRFT's `trainer`."""

from rlbench.trainers.ppo.spmd_trainer import SPMDPPOTrainer, SPMDPPOTrainerBase, SPMDPPOTrainerVL

__all__ = ["SPMDPPOTrainer", "SPMDPPOTrainerBase", "SPMDPPOTrainerVL"]
