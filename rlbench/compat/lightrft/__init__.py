"""LightRFT's packages: `from rlbench.strategy.fsdp.fsdpv2 import FSDPV2Strategy`, as its scripts write it.

`rlbench` looks here for packages that it does not have itself (the end of `rlbench/__init__.py`), so that
`rlbench.strategy`, `rlbench.trainer` and `rlbench.utils` need no folder beside the rooms they stand for.
"""
