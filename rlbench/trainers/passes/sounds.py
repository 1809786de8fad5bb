"""Sounds of a micro-batch, as the forward of an audio-language model takes them.

The family of Qwen2-Audio: `input_features` and `feature_attention_mask` by the checkpoint's own feature extractor, put
in by the model itself where its placeholder token stands. Positions are those of text, so packing changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.data.batches.batch import TrainBatch
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.texts.media_features import shown_at
from rlbench.data.texts.sound_features import BLANK_TOKENS, SpectrogramReader, blank_sound, sounds_at
from rlbench.data.texts.sound_tokens import tokens_of_frames
from rlbench.errors import DataError
from rlbench.nn.huggingface import BaseHuggingFaceTrainModule
from rlbench.trainers.passes.images import ImageReader, spans_of, with_one_more
from rlbench.trainers.passes.packing import ModelInputs


class SoundReader:
    """Of one model; its feature extractor is loaded when a sound first arrives."""

    name = "sound"
    takes = ("sounds",)

    def __init__(self, module: Any) -> None:
        self._module = module
        self._token = int(module.config.audio_token_id)
        self._spectrograms = SpectrogramReader(partial(_extractor_of, module))
        self._counts: dict[str, int] = {}

    @classmethod
    def of(cls, module: nn.Module) -> SoundReader | None:
        """Return that of an audio-language model, None of another."""
        config, tower = getattr(module, "config", None), getattr(getattr(module, "model", None), "audio_tower", None)
        return cls(module) if hasattr(tower, "conv2") and hasattr(config, "audio_token_id") else None

    def check(self, batch: TrainBatch) -> None:
        """Refuse rows that have no placeholder tokens for their sounds, by the sounds' lengths."""
        for row, sounds in enumerate(batch.sounds or ()):
            places = np.concatenate([batch.prompts[row], batch.responses[row]]) == self._token
            try:
                shown_at(places, sounds, list(map(self._tokens, sounds)), len(batch.prompts[row]), self.name)
            except DataError as error:
                raise DataError(
                    f"sequence {row} {error}: give the tokens as the sampler used them, each sound's placeholder "
                    "expanded"
                ) from None

    def placed(
        self, inputs: ModelInputs, rows: TrainBatch, packed: bool, there: Collection[str] = takes
    ) -> ModelInputs:
        """Return the layout with the rows' sounds; where there are none with a blank one behind all rows, which no row
        hears: the tower runs as it does on other ranks, and its gradient is zero."""
        sounds: list[Sequence[EncodedSound | None]] = list(rows.sounds or [()] * len(rows))
        prompts = rows.prompts.lengths.tolist()
        read = [[self._spectrograms.read(sound) for sound in own] for own in rows.sounds or [()] * len(rows)]
        counts = [[self._length(mask) for _, mask in own] for own in read]
        if max((count for own in counts for count in own), default=0) < BLANK_TOKENS:
            inputs = with_one_more(inputs, self._token, packed, BLANK_TOKENS)
            sounds, prompts, read = (
                [*sounds, (None,)],
                [*prompts, 0],
                [*read, [blank_sound(self._module.model.audio_tower)]],
            )
            counts = [*counts, [BLANK_TOKENS]]
        device, ids = inputs.input_ids.device, inputs.input_ids.cpu()
        held = torch.zeros_like(ids, dtype=torch.bool)
        for (row, span), shown, own, prompt in zip(spans_of(inputs, packed), sounds, counts, prompts, strict=True):
            places = (ids[row, span] == self._token).numpy()
            held[row, span] = torch.from_numpy(shown_at(places, shown, own, prompt, self.name))
        flat = [one for own in read for one in own]
        given = {"input_features": torch.stack([spectrogram for spectrogram, _ in flat]).to(device)}
        given["feature_attention_mask"] = torch.stack([mask for _, mask in flat]).to(device)
        sampled = not torch.equal(held, ids == self._token)
        return replace(inputs, media=given, placeholders=held.to(device) if sampled else None)

    def placing(self, inputs: ModelInputs) -> AbstractContextManager[None]:
        """Have the model take as placeholders those of the sounds alone, where a policy sampled the token too."""
        if inputs.placeholders is None:
            return nullcontext()
        return sounds_at(self._module.model, self._token, inputs.placeholders)

    def _tokens(self, sound: EncodedSound) -> int:
        if sound.digest not in self._counts:
            self._counts[sound.digest] = self._length(self._spectrograms.read(sound)[1])
        return self._counts[sound.digest]

    def _length(self, mask: Tensor) -> int:
        """Return how many tokens a sound of these frames takes, by the model's own rule."""
        return tokens_of_frames(int(mask.sum()), self._module.model.audio_tower._get_feat_extract_output_lengths)


Reader = ImageReader | SoundReader


def media_reader(module: nn.Module) -> Reader | None:
    """Return what reads images and videos, or sounds, for a model; None of a model of text."""
    return ImageReader.of(module) or SoundReader.of(module)


def _extractor_of(module: Any) -> Any:
    """Load the checkpoint's own feature extractor."""
    from transformers import AutoFeatureExtractor

    source = BaseHuggingFaceTrainModule.materialization_source(module)  # not where its weights come from
    return AutoFeatureExtractor.from_pretrained(source, revision=getattr(module, "_source_revision", None))
