"""What a user's module may define: the bases to inherit from, their hooks, and how to make one on meta."""

from rlbench.nn.base import (
    BaseTrainModule,
    Fsdp2TrainModule,
    FsdpTrainModule,
    MethodInfo,
    RankContext,
    callable_methods,
    callable_names,
    check_module,
    device,
)
from rlbench.nn.huggingface import (
    BaseHuggingFaceTrainModule,
    HuggingFaceFsdp2TrainModule,
    HuggingFaceFsdpTrainModule,
)

__all__ = [
    "BaseHuggingFaceTrainModule",
    "BaseTrainModule",
    "Fsdp2TrainModule",
    "FsdpTrainModule",
    "HuggingFaceFsdp2TrainModule",
    "HuggingFaceFsdpTrainModule",
    "MethodInfo",
    "RankContext",
    "callable_methods",
    "callable_names",
    "check_module",
    "device",
]
