"""The reference system's name of `rlbench.strategies`: scripts of its users run with the package's name changed."""

from rlbench.strategies import FakeStrategy, get_fake_strategy, get_strategy

__all__ = ["FakeStrategy", "get_fake_strategy", "get_strategy"]
