"""RLite's `rlite.nn`: the bases of `rlbench.nn`, one for inference, and those of FSDP1, which are refused."""

from __future__ import annotations

from typing import Any

from rlbench.errors import BuildError
from rlbench.nn import BaseHuggingFaceTrainModule, BaseTrainModule, Fsdp2TrainModule, HuggingFaceFsdp2TrainModule

__all__ = ["BaseHuggingFaceTrainModule", "BaseInferenceModule", "BaseTrainModule", "Fsdp2TrainModule"]
__all__ += ["FsdpTrainModule", "HuggingFaceFsdp2TrainModule", "HuggingFaceFsdpTrainModule"]


class BaseInferenceModule:
    """What an inference engine may be given instead of a path: it says where the checkpoint is."""

    def get_checkpoint_path(self) -> str:
        """Folder or hub id."""
        raise BuildError(f"{type(self).__name__} does not say where its weights are: define get_checkpoint_path()")


class _Fsdp1:
    """Refuse the class statement of a module meant for FSDP1."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__ != __name__:
            raise BuildError(
                f"class {cls.__name__}: modules are sharded by FSDP2, and FSDP1 is not here. Inherit from "
                "Fsdp2TrainModule, or HuggingFaceFsdp2TrainModule; hooks and methods stay as they are"
            )


class FsdpTrainModule(_Fsdp1, BaseTrainModule):
    """RLite's base for FSDP1: a class that inherits from it is refused."""


class HuggingFaceFsdpTrainModule(_Fsdp1, BaseHuggingFaceTrainModule):
    """The same for transformers models."""
