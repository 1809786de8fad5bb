"""Rows of tokens with their sounds, as a sequence classifier of Qwen2-Audio's kind reads them in this process.

Spectrograms come from the checkpoint's own feature extractor; positions are those of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.texts.media_features import shown_at
from rlbench.data.texts.sound_features import BLANK_TOKENS, SpectrogramReader, blank_sound, sounds_at
from rlbench.data.texts.sound_tokens import SoundTokens
from rlbench.rewards.last_tokens import padded

if TYPE_CHECKING:
    from torch import Tensor


class HearingReader:
    """Of one model of `media_classifier`, and of how its checkpoint takes sounds."""

    def __init__(self, model: Any, source: str) -> None:
        self._model, self._tokens = model, SoundTokens.of(source)
        self._spectrograms = SpectrogramReader(lambda: self._tokens.processor)

    def expanded(self, ids: Sequence[int], sounds: Sequence[EncodedSound]) -> list[int]:
        """Return a rendered text with each sound's placeholder repeated for all of its tokens; see `MediaTokens`."""
        return self._tokens.repeated(ids, sounds)

    def outputs(self, rows: Sequence[Sequence[int]], sounds: Sequence[Sequence[EncodedSound]]) -> Tensor:
        """Return what the head says at each row's last token, (B, labels) float32; `sounds`: those of each row, whose
        placeholders stand in it, expanded."""
        import torch

        from rlbench.rewards.shaped_head import scores_at_the_ends

        device, count = next(self._model.parameters()).device, len(rows)
        counts = [[self._tokens.count(sound) for sound in own] for own in sounds]
        read = [self._spectrograms.read(sound) for own in sounds for sound in own]
        if read and max(n for own in counts for n in own) < BLANK_TOKENS:  # see there
            rows, sounds, counts = [*rows, [self._tokens.token] * BLANK_TOKENS], [*sounds, ()], [*counts, []]
            read.append(blank_sound(self._model.model.audio_tower))
        ids, mask = padded(rows, 0)
        held = torch.zeros_like(ids, dtype=torch.bool)
        for row, (shown, own) in enumerate(zip(sounds, counts, strict=True)):
            places = (ids[row, : len(rows[row])] == self._tokens.token).numpy()
            held[row, : len(places)] = torch.from_numpy(shown_at(places, shown, own, 0, "sound"))
        if len(rows) > count:
            held[count:, :BLANK_TOKENS] = True
        more = {}
        if read:
            more["input_features"] = torch.stack([spectrogram for spectrogram, _ in read]).to(device)
            more["feature_attention_mask"] = torch.stack([frames for _, frames in read]).to(device)
        with sounds_at(self._model.base_model, self._tokens.token, held.to(device)):
            return scores_at_the_ends(self._model, ids.to(device), mask.to(device), **more)[:count]
