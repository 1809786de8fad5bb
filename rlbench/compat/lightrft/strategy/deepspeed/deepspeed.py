"""LightRFT's `strategy.deepspeed.deepspeed`: `rlbench.strategies.deepspeed`."""

from rlbench.strategies.deepspeed import DeepspeedStrategy

__all__ = ["DeepspeedStrategy"]
