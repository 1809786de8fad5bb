"""What a user's module may define: the bases to inherit from, their hooks, and how to make one on meta."""

from rlbench.nn.base import (
    BaseTrainModule,
    Fsdp2TrainModule,
    MethodInfo,
    RankContext,
    callable_methods,
    check_module,
    device,
)
from rlbench.nn.huggingface import BaseHuggingFaceTrainModule, HuggingFaceFsdp2TrainModule

__all__ = [
    "BaseHuggingFaceTrainModule",
    "BaseTrainModule",
    "Fsdp2TrainModule",
    "HuggingFaceFsdp2TrainModule",
    "MethodInfo",
    "RankContext",
    "callable_methods",
    "check_module",
    "device",
]
