"""RLite's names: `import rlbench.compat.rlite as rlite`."""

from rlbench import InferenceEngine as RliteInferenceEngine
from rlbench import NeedParallel, device, init
from rlbench import TrainEngine as RliteTrainEngine
from rlbench.compat.rlite import nn
from rlbench.envs.hook import IndexedGenerationHistory

__all__ = ["IndexedGenerationHistory", "NeedParallel", "RliteInferenceEngine", "RliteTrainEngine"]
__all__ += ["device", "init", "nn"]
