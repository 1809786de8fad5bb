"""The values that travel: prompts, rollouts and training batches, stored as flat numpy arrays."""

from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.batch import TrainBatch
from rlbench.data.joining import join
from rlbench.data.prompts.images import EncodedImage
from rlbench.data.prompts.loading import load
from rlbench.data.prompts.mixing import Mixture, mix
from rlbench.data.prompts.prompt import Prompt, as_prompts
from rlbench.data.prompts.set import PromptSet
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.prompts.stream import PromptStream
from rlbench.data.prompts.videos import EncodedVideo
from rlbench.data.rollouts.jobs import FINISH_REASONS, GeneratedArrays, GenerateJob
from rlbench.data.rollouts.rollouts import PromptGroup, Rollout, Rollouts
from rlbench.data.texts.demonstrations import demonstrations
from rlbench.data.texts.preferences import labelled, pairs
from rlbench.data.texts.stream import TextStream
from rlbench.data.texts.tokens import datum

__all__ = [
    "FINISH_REASONS",
    "EncodedImage",
    "EncodedSound",
    "EncodedVideo",
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
    "TextStream",
    "TrainBatch",
    "as_prompts",
    "datum",
    "demonstrations",
    "join",
    "labelled",
    "load",
    "mix",
    "pairs",
]
