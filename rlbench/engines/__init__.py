"""What a user holds: engines by role, `NeedParallel`, placement."""

from rlbench.engines.inference import InferenceEngine
from rlbench.engines.parallel import NeedParallel
from rlbench.engines.train import TrainEngine

__all__ = ["InferenceEngine", "NeedParallel", "TrainEngine"]
