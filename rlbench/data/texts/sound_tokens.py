"""Sounds in texts, as a model of Qwen2-Audio's kind counts their tokens: by the frames of their spectrogram."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.texts.media_tokens import MediaTokens
from rlbench.data.texts.sound_features import decoded_sound
from rlbench.errors import DataError

Rule = Callable[..., Any]
"""An audio tower's own: frames of a spectrogram (tensor) to (frames behind its convolutions, tokens)."""


@dataclass(frozen=True, eq=False)
class SoundTokens(MediaTokens[EncodedSound]):
    """Of a model that hears. `processor`: its feature extractor; `rule`: how many tokens frames become."""

    rule: Rule
    name = "sound"
    _known: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str) -> SoundTokens:
        """Read them from a checkpoint, a folder or hub id, once. Raises DataError where its model takes no sounds."""
        return _read(source)

    def count(self, one: EncodedSound) -> int:
        """Return how many tokens a sound takes. Raises DataError for one longer than the model's window, or too short
        for a token."""
        if one.digest not in self._known:
            frames = -(-len(decoded_sound(one, self.processor)) // int(self.processor.hop_length))
            self._known[one.digest] = tokens_of_frames(frames, self.rule)
        return self._known[one.digest]


def tokens_of_frames(frames: int, rule: Rule) -> int:
    """Return how many tokens a sound of so many frames takes. Raises DataError for one too short."""
    import torch

    count = int(rule(torch.tensor(frames))[1])
    if count < 1:
        raise DataError(f"has a sound of {frames} frames, too short for the model: give more of it")
    return count


@lru_cache(maxsize=8)
def _read(source: str) -> SoundTokens:
    from transformers import AutoConfig, AutoFeatureExtractor, AutoModel

    try:
        config = AutoConfig.from_pretrained(source)
        token = getattr(config, "audio_token_id", None)
        extractor = None if token is None else AutoFeatureExtractor.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise DataError(f"it has sounds, and the tokenizer's model {source!r} cannot be read: {reason}") from error
    kind = type(getattr(config, "audio_config", None))
    tower = AutoModel._model_mapping[kind] if kind in AutoModel._model_mapping else None
    rule = getattr(tower, "_get_feat_extract_output_lengths", None)
    if extractor is None or token is None or rule is None:
        raise DataError(f"it has sounds, and {source!r} is no model of Qwen2-Audio's kind that hears them")
    return SoundTokens(int(token), extractor, partial(rule, None))  # the rule reads nothing of a tower
