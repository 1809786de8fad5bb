"""LightRFT's `strategy.deepspeed.deepspeed`: a strategy that is refused when it is built."""

from rlbench.strategies.factory import DeepspeedStrategy

__all__ = ["DeepspeedStrategy"]
