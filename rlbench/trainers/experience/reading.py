"""What a reward model on a trainer's ranks reads of samples."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlbench.data.prompts.images import EncodedImage
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.rewards.reward_model import model as ClassifierReward
from rlbench.rewards.reward_model import refuse_sounds, refuse_videos
from rlbench.trainers.passes.images import ImageReader


def sequences_of(
    model: nn.Module, rollouts: Rollouts, tokenizer: Any
) -> tuple[list[list[int]], list[tuple[EncodedImage, ...]]]:
    """Return what a model on the ranks reads of each sample, and sees: the tokens with the prompt's images and those
    that an environment showed, places counted from the first token; or the texts in a tokenizer of its own, with the
    images where the model sees."""
    own, completions = getattr(model, "tokenizer", None), list(rollouts.flat)
    images = [rollout.all_images for rollout in completions]
    if own is None or own is tokenizer:
        refuse_videos(completions, f"the reward model {type(model).__name__}")
        refuse_sounds(completions, f"the reward model {type(model).__name__}")
        sequences = [[*map(int, one.prompt_token_ids), *one.token_ids] for one in completions]
        return sequences, images if any(images) else []
    sees = ImageReader.of(model) is not None and any(images)
    reader = ClassifierReward("", as_sampled=True) if sees else ClassifierReward("", chat=None)
    return [reader.token_ids(rollout, own) for rollout in completions], images if sees else []
