"""A tiny random Qwen2-Audio on disk, sounds, and the same forward by transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoFeatureExtractor,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

import rlbench.nn
from rlbench.data.base.ragged import Ragged
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.tiny.tokenizer import build_tokenizer
from rlbench.weights.names import once
from tests.trainers.policy_reference import batch

TOKENS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for content in message['content'] -%}"
    "{%- if content['type'] == 'audio' -%}{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}"
    "{%- elif 'text' in content -%}{{- content['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
LENGTHS = [(5, 4), (9, 6), (7, 5), (12, 3), (6, 7), (8, 2)]
MELS, RATE, HOP = 16, 16_000, 160


class TrainedEars(rlbench.nn.HuggingFaceFsdp2TrainModule, Qwen2AudioForConditionalGeneration):
    def on_weights_materialized(self) -> None:
        self.optimizer = self.strategy.create_optimizer(self, lr=1e-2, weight_decay=0.0)


def build_processor(window: int = 30) -> Qwen2AudioProcessor:
    """The family's processor around the tiny tokenizer, with fewer mel bins and windows of so many seconds."""
    tokenizer = build_tokenizer(1024)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    tokenizer.chat_template = TEMPLATE
    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=window)
    return Qwen2AudioProcessor(extractor, tokenizer, chat_template=TEMPLATE)


def save_ears(folder: Path, seed: int = 1, wide: float = 0.02, window: int = 30) -> str:
    """A tiny model, with weights so wide that all of them count. Its windows are 30 s where vLLM runs it, which asks
    for that; a forward computes on the whole window, however short the sound, so that others take a short one."""
    processor = build_processor(window)
    words = processor.tokenizer
    config = Qwen2AudioConfig(
        text_config={
            "model_type": "qwen2",
            "vocab_size": len(words),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": words.eos_token_id,
            "pad_token_id": words.pad_token_id,
        },
        audio_config={
            "num_mel_bins": MELS,
            "d_model": 64,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "max_source_positions": window * RATE // HOP // 2,
        },
        audio_token_id=processor.audio_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2AudioForConditionalGeneration(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * wide)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    file = folder / "model.safetensors"  # by the names that checkpoints of the family have
    save_file({once(name): tensor.clone() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return str(folder)


def on_meta(path: str) -> Any:
    with rlbench.nn.device("meta"):
        return TrainedEars.from_pretrained(path)


def sounds(count: int, rate: int = RATE) -> list[EncodedSound]:
    """Sounds of several lengths, half a second about, each another tone."""
    found = []
    for number in range(count):
        times = np.arange(int(rate * (0.4 + 0.15 * number))) / rate
        tone = 0.4 * np.sin(2 * np.pi * (300 + 250 * number) * times) + 0.05 * np.sin(2 * np.pi * 2500 * times**2)
        found.append(EncodedSound.from_any((tone, rate)))
    return found


def tokens_of(sound: EncodedSound) -> int:
    """How many tokens a sound of the model's own rate takes: two strided layers over the frames of its window."""
    frames = -(-sound.frames // HOP)
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def with_sounds(held: list[list[EncodedSound]], lengths: Any = LENGTHS, **fields: Any) -> Any:
    """A batch whose prompts hold these sounds, each with its placeholders, somewhere among the text."""
    given = batch(lengths=lengths[: len(held)], **fields)
    token = build_processor().audio_token_id
    prompts = []
    for prompt, own in zip(given.prompts, held, strict=True):
        parts = [prompt[:2]]
        for sound in own:
            parts += [np.full(tokens_of(sound), token), prompt[2:4]]
        prompts.append(np.concatenate([*parts, prompt[2:]]))
    return given.replace(prompts=Ragged.from_rows(prompts, np.int32), sounds=tuple(map(tuple, held)))


class Plain:
    """transformers' own model, called with one row after another of a batch."""

    def __init__(self, path: str, given: Any) -> None:
        self.model = Qwen2AudioForConditionalGeneration.from_pretrained(path)
        positions = self.model.model.audio_tower.embed_positions.requires_grad_(False)  # as the architecture makes them
        assert positions.weight.grad is None
        self._extractor, self._rows = AutoFeatureExtractor.from_pretrained(path), iter(range(len(given)))
        self._given = given

    def __call__(self, ids: torch.Tensor) -> Any:
        own = self._given.sounds[next(self._rows)]
        return self.model(input_ids=ids, **features(self._extractor, own))


def features(extractor: Any, held: Any) -> dict[str, torch.Tensor]:
    """What transformers' model takes of sounds at the extractor's own rate; nothing of none."""
    if not held:
        return {}
    waves = [sound.samples(sound.rate) for sound in held]
    made = extractor(waves, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="pt")
    return {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
