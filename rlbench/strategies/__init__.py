"""What stands between a user's method and torch on a rank: prepare, backward, step, offload, keep.

Names come on first use: torch is imported with the first of them that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbench.lazy import lazy_names

if TYPE_CHECKING:
    from rlbench.strategies.base import StrategyBase as StrategyBase
    from rlbench.strategies.deepspeed import DeepspeedStrategy as DeepspeedStrategy
    from rlbench.strategies.factory import get_fake_strategy as get_fake_strategy
    from rlbench.strategies.factory import get_strategy as get_strategy
    from rlbench.strategies.fake import FakeStrategy as FakeStrategy
    from rlbench.strategies.fsdp2 import FSDPV2Strategy as FSDPV2Strategy
    from rlbench.strategies.fsdp2 import manual_transformer_cls_names_to_wrap as manual_transformer_cls_names_to_wrap
    from rlbench.strategies.generation.length_analysis import GenLenAnalyser as GenLenAnalyser
    from rlbench.strategies.optim.mp_optimizer import FSDPadaptOptimizer as FSDPadaptOptimizer
    from rlbench.strategies.optim.mp_optimizer import is_mp_optimizer as is_mp_optimizer
    from rlbench.strategies.options.config import OptionError as OptionError
    from rlbench.strategies.options.config import StrategyConfig as StrategyConfig
    from rlbench.strategies.options.config import add_arguments as add_arguments
    from rlbench.strategies.sharding.preparation import ModelOptimPair as ModelOptimPair
    from rlbench.strategies.sharding.preparation import ModelOrModelOptimPair as ModelOrModelOptimPair

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "StrategyBase": "base",
        "DeepspeedStrategy": "deepspeed",
        "get_fake_strategy": "factory",
        "get_strategy": "factory",
        "FakeStrategy": "fake",
        "FSDPV2Strategy": "fsdp2",
        "GenLenAnalyser": "generation.length_analysis",
        "FSDPadaptOptimizer": "optim.mp_optimizer",
        "is_mp_optimizer": "optim.mp_optimizer",
        "OptionError": "options.config",
        "StrategyConfig": "options.config",
        "add_arguments": "options.config",
        "ModelOptimPair": "sharding.preparation",
        "ModelOrModelOptimPair": "sharding.preparation",
        "manual_transformer_cls_names_to_wrap": "fsdp2",
    },
)
