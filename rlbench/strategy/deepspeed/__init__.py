"""The reference system's name of the part of `rlbench.strategies` that would be DeepSpeed."""
