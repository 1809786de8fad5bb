"""LightRFT's `utils`."""

from rlbench.strategies import add_arguments

__all__ = ["add_arguments"]
