"""The values that travel: prompts, rollouts and training batches, stored as flat numpy arrays."""

from rlbench.data.batch import TrainBatch
from rlbench.data.jobs import FINISH_REASONS, GeneratedArrays, GenerateJob
from rlbench.data.prompts import Prompt, as_prompts
from rlbench.data.ragged import Ragged
from rlbench.data.rollouts import PromptGroup, Rollout, Rollouts

__all__ = [
    "FINISH_REASONS",
    "GenerateJob",
    "GeneratedArrays",
    "Prompt",
    "PromptGroup",
    "Ragged",
    "Rollout",
    "Rollouts",
    "TrainBatch",
    "as_prompts",
]
