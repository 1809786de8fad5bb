"""LightRFT's packages: `from rlbench.compat.lightrft.strategy.fsdp.fsdpv2 import FSDPV2Strategy`.

Each is the very module of the same path below `rlbench`, so that a class has one identity whichever way it came.
"""

import importlib
import sys

from rlbench import strategy, trainer, utils

__all__ = ["strategy", "trainer", "utils"]

for _path in (
    "strategy",
    "strategy.strategy_base",
    "strategy.fsdp",
    "strategy.fsdp.fsdpv2",
    "strategy.deepspeed",
    "strategy.deepspeed.deepspeed",
    "trainer",
    "trainer.spmd_ppo_trainer",
    "utils",
):
    sys.modules[f"{__name__}.{_path}"] = importlib.import_module(f"rlbench.{_path}")
