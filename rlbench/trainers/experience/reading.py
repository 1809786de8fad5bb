"""What a reward model on a trainer's ranks reads of samples."""

from __future__ import annotations

from typing import Any

from torch import nn

from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.rewards.reward_model import media_of, refuse_videos
from rlbench.rewards.reward_model import model as ClassifierReward
from rlbench.trainers.passes.images import ImageReader
from rlbench.trainers.passes.sounds import media_reader


def sequences_of(
    model: nn.Module, rollouts: Rollouts, tokenizer: Any
) -> tuple[list[list[int]], list[tuple[EncodedMedia, ...]]]:
    """Return what a model on the ranks reads of each sample, and sees or hears: the tokens with the prompt's images and
    those that an environment showed, places counted from the first token, or with its sounds; or the texts in a
    tokenizer of its own, with what the model takes of these."""
    own, completions = getattr(model, "tokenizer", None), list(rollouts.flat)
    media = [media_of(rollout) for rollout in completions]
    refuse_videos(completions, f"the reward model {type(model).__name__}")
    if own is None or own is tokenizer:
        sequences = [[*map(int, one.prompt_token_ids), *one.token_ids] for one in completions]
        return sequences, media if any(media) else []
    found = media_reader(model)
    there = any(one.images or one.observed_images for one in completions), any(one.sounds for one in completions)
    takes = found is not None and there[0 if isinstance(found, ImageReader) else 1]
    reader = ClassifierReward("", as_sampled=True) if takes else ClassifierReward("", chat=None)
    return [reader.token_ids(rollout, own) for rollout in completions], media if takes else []
