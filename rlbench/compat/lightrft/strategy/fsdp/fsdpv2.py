"""LightRFT's `strategy.fsdp.fsdpv2`: `rlbench.strategies.fsdp2`."""

from rlbench.strategies import (
    FSDPadaptOptimizer,
    FSDPV2Strategy,
    ModelOptimPair,
    ModelOrModelOptimPair,
    is_mp_optimizer,
    manual_transformer_cls_names_to_wrap,
)

__all__ = ["FSDPV2Strategy", "FSDPadaptOptimizer", "ModelOptimPair", "ModelOrModelOptimPair"]
__all__ += ["is_mp_optimizer", "manual_transformer_cls_names_to_wrap"]
