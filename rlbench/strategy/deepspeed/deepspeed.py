"""The reference system's place of `DeepspeedStrategy`."""

from rlbench.strategies.factory import DeepspeedStrategy

__all__ = ["DeepspeedStrategy"]
