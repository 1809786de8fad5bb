"""LightRFT's `strategy`: `rlbench.strategies`."""

from rlbench.strategies import FakeStrategy, get_fake_strategy, get_strategy

__all__ = ["FakeStrategy", "get_fake_strategy", "get_strategy"]
