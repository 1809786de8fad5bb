"""Sounds as a model of Qwen2-Audio's kind computes with them: spectrograms by the checkpoint's feature extractor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.texts.media_features import FeatureReader
from rlbench.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


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
