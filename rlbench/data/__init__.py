"""The values that travel: prompts, rollouts and training batches, stored as flat numpy arrays."""

from rlbench.data.batch import TrainBatch
from rlbench.data.jobs import FINISH_REASONS, GeneratedArrays, GenerateJob
from rlbench.data.joining import join
from rlbench.data.loading import load
from rlbench.data.mixing import Mixture, mix
from rlbench.data.prompt_set import PromptSet
from rlbench.data.prompt_stream import PromptStream
from rlbench.data.prompts import Prompt, as_prompts
from rlbench.data.ragged import Ragged
from rlbench.data.rollouts import PromptGroup, Rollout, Rollouts

__all__ = [
    "FINISH_REASONS",
    "GenerateJob",
    "GeneratedArrays",
    "Mixture",
    "Prompt",
    "PromptGroup",
    "PromptSet",
    "PromptStream",
    "Ragged",
    "Rollout",
    "Rollouts",
    "TrainBatch",
    "as_prompts",
    "join",
    "load",
    "mix",
]
