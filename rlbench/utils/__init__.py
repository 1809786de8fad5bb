"""The reference system's place of `add_arguments`."""

from rlbench.strategies import add_arguments

__all__ = ["add_arguments"]
