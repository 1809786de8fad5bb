"""The reference system's name of the part of `rlbench.strategies` that is FSDP2."""
