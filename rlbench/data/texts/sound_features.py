"""Sounds as a model of Qwen2-Audio's kind computes with them: spectrograms by the checkpoint's feature extractor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.texts.media_features import FeatureReader
from rlbench.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


BLANK_TOKENS = 2
"""Of a blank sound. transformers takes a row without two placeholders side by side for one that is not expanded."""


class SpectrogramReader(FeatureReader[EncodedSound]):
    """Of sounds: the spectrogram (mel bins, frames) float32, silence behind the sound, and which frames are its own,
    (frames,) int64."""

    def made(self, one: EncodedSound) -> tuple[Tensor, Tensor]:
        """Compute what `read` keeps."""
        features = self.processor(
            [decoded_sound(one, self.processor)],
            sampling_rate=self.processor.sampling_rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        return features["input_features"][0], features["attention_mask"][0]


def decoded_sound(sound: EncodedSound, extractor: Any) -> np.ndarray:
    """Return a sound's samples, (n,) float32, at the rate that a feature extractor takes. DataError for one that is
    longer than its window, of which it would cut the end off."""
    samples = sound.samples(int(extractor.sampling_rate))
    if len(samples) > extractor.n_samples:
        most = extractor.n_samples / extractor.sampling_rate
        raise DataError(f"the sound {sound} is longer than the {most:g} s that its model hears: cut it, or give parts")
    return samples


def blank_sound(tower: Any) -> tuple[Tensor, Tensor]:
    """Return the spectrogram of a sound of BLANK_TOKENS that holds nothing, and its frames, for an audio tower."""
    import torch

    frames = tower.config.max_source_positions * tower.conv1.stride[0] * tower.conv2.stride[0]
    mask = torch.zeros(frames, dtype=torch.int64)
    while int(tower._get_feat_extract_output_lengths(mask.sum())[1]) < BLANK_TOKENS:
        mask[: int(mask.sum()) + 1] = 1
    return torch.zeros(tower.config.num_mel_bins, frames), mask


@contextmanager
def sounds_at(backbone: Any, token: int, held: Tensor) -> Iterator[None]:
    """Have a backbone put its sounds at the tokens that are `held` (B, T) bool, wherever else the placeholder stands.
    It looks for placeholders in its ids: the others are hidden there, and shown to its embedding again."""
    whole: list[Tensor] = []

    def hide(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole[:] = [given["input_ids"]]
        hidden = (given["input_ids"] == token) & ~held
        return args, {**given, "input_ids": given["input_ids"].masked_fill(hidden, 0 if token else 1)}

    def show(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(whole)

    hooks = [
        backbone.register_forward_pre_hook(hide, with_kwargs=True),
        backbone.get_input_embeddings().register_forward_pre_hook(show, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
