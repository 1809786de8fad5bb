"""The command `rlbench train`."""
