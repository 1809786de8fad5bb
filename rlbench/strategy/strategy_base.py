"""The reference system's name of `rlbench.strategies.base`."""

from rlbench.strategies.base import StrategyBase

__all__ = ["StrategyBase"]
