"""RLite's `rlite.nn`: the bases of `rlbench.nn`, and one for inference."""

from __future__ import annotations

from rlbench.errors import BuildError
from rlbench.nn import (
    BaseHuggingFaceTrainModule,
    BaseTrainModule,
    Fsdp2TrainModule,
    FsdpTrainModule,
    HuggingFaceFsdp2TrainModule,
    HuggingFaceFsdpTrainModule,
)

__all__ = ["BaseHuggingFaceTrainModule", "BaseInferenceModule", "BaseTrainModule", "Fsdp2TrainModule"]
__all__ += ["FsdpTrainModule", "HuggingFaceFsdp2TrainModule", "HuggingFaceFsdpTrainModule"]


class BaseInferenceModule:
    """What an inference engine may be given instead of a path: it says where the checkpoint is."""

    def get_checkpoint_path(self) -> str:
        """Folder or hub id."""
        raise BuildError(f"{type(self).__name__} does not say where its weights are: define get_checkpoint_path()")
