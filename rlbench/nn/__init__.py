"""What a user's module may define: the bases to inherit from, their hooks, and the context that makes them
on meta."""

from rlbench.nn.base import BaseTrainModule, Fsdp2TrainModule, RankContext
from rlbench.nn.huggingface import BaseHuggingFaceTrainModule, HuggingFaceFsdp2TrainModule
from rlbench.nn.meta import check_module, device
from rlbench.nn.methods import MethodInfo, callable_methods

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
