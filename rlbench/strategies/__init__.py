"""What stands between a user's method and torch on a rank: prepare, backward, step, offload, keep.

Names come on first use: torch is imported with the first of them that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbench.lazy import lazy_names

if TYPE_CHECKING:
    from rlbench.strategies.base import StrategyBase
    from rlbench.strategies.factory import DeepspeedStrategy, get_strategy
    from rlbench.strategies.fake import FakeStrategy, get_fake_strategy
    from rlbench.strategies.fsdp2 import (
        FSDPadaptOptimizer,
        FSDPV2Strategy,
        ModelOptimPair,
        ModelOrModelOptimPair,
        is_mp_optimizer,
        manual_transformer_cls_names_to_wrap,
    )
    from rlbench.strategies.generation.length_analysis import GenLenAnalyser
    from rlbench.strategies.options.arguments import add_arguments
    from rlbench.strategies.options.config import OptionError, StrategyConfig

_NAMES = {
    "add_arguments": "options.arguments",
    "StrategyBase": "base",
    "StrategyConfig": "options.config",
    "OptionError": "options.config",
    "get_strategy": "factory",
    "DeepspeedStrategy": "factory",
    "FakeStrategy": "fake",
    "get_fake_strategy": "fake",
    "FSDPV2Strategy": "fsdp2",
    "FSDPadaptOptimizer": "fsdp2",
    "is_mp_optimizer": "fsdp2",
    "ModelOptimPair": "fsdp2",
    "ModelOrModelOptimPair": "fsdp2",
    "manual_transformer_cls_names_to_wrap": "fsdp2",
    "GenLenAnalyser": "generation.length_analysis",
}

__all__ = [
    "DeepspeedStrategy",
    "FSDPV2Strategy",
    "FSDPadaptOptimizer",
    "FakeStrategy",
    "GenLenAnalyser",
    "ModelOptimPair",
    "ModelOrModelOptimPair",
    "OptionError",
    "StrategyBase",
    "StrategyConfig",
    "add_arguments",
    "get_fake_strategy",
    "get_strategy",
    "is_mp_optimizer",
    "manual_transformer_cls_names_to_wrap",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
