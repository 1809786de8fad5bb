"""LightRFT's `strategy.strategy_base`: `rlbench.strategies.base`."""

from rlbench.strategies.base import StrategyBase

__all__ = ["StrategyBase"]
