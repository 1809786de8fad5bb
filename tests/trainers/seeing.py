"""A random Qwen2.5-VL or Qwen3-VL on disk, batches with pictures, and the same forward by transformers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

import rlbench.nn
from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.batch import PER_TOKEN
from rlbench.data.prompts.images import EncodedImage, PlacedImage
from rlbench.tiny import vision
from rlbench.tiny.vision_model import CHAT_TEMPLATE, build_model, build_processor
from tests.trainers.policy_reference import batch

LENGTHS = [(5, 4), (9, 6), (7, 5), (12, 3), (6, 7), (8, 2)]
VOCAB = 96


class TrainedEyes(rlbench.nn.HuggingFaceFsdp2TrainModule, Qwen2_5_VLForConditionalGeneration):
    def on_weights_materialized(self) -> None:
        self.optimizer = self.strategy.create_optimizer(self, lr=1e-2, weight_decay=0.0)


class TrainedDeepEyes(rlbench.nn.HuggingFaceFsdp2TrainModule, Qwen3VLForConditionalGeneration):
    def on_weights_materialized(self) -> None:
        self.optimizer = self.strategy.create_optimizer(self, lr=1e-2, weight_decay=0.0)


FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def build_qwen3(seed: int) -> tuple[Qwen3VLForConditionalGeneration, Qwen3VLProcessor]:
    """A Qwen3-VL with the words and the template of "tiny-vision"; its tower's features go into the first layer too."""
    words = build_processor().tokenizer
    pixels = {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}
    how: Any = {"size": pixels, "patch_size": 16}
    images, videos = Qwen2VLImageProcessor(**how), Qwen3VLVideoProcessor(**how)
    processor = Qwen3VLProcessor(images, words, videos, chat_template=CHAT_TEMPLATE)
    tokens = {name: words.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    axes = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}  # as its checkpoints have it: vLLM asks for both
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(words),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **axes},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_start_token_id=tokens["vision_start"],
        vision_end_token_id=tokens["vision_end"],
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration(config), processor


def build_eyes(family: str, seed: int) -> tuple[Any, Any]:
    """Model and processor of one of `FAMILIES`, random."""
    if family == "qwen3_vl":
        return build_qwen3(seed)
    processor = build_processor()
    return build_model(processor, seed), processor


def save_eyes(folder: Path, family: str = "qwen2_5_vl") -> str:
    """A tiny model before any warm-up, with weights large enough that all of them count."""
    model, processor = build_eyes(family, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def on_meta(path: str) -> Any:
    kind = json.loads((Path(path) / "config.json").read_text())["model_type"]
    with rlbench.nn.device("meta"):
        return (TrainedDeepEyes if kind == "qwen3_vl" else TrainedEyes).from_pretrained(path)


def pictures(count: int) -> list[EncodedImage]:
    """Pictures of several sizes."""
    found = []
    for number, row in enumerate(vision.vision_prompts(count, seed=5)):
        image = EncodedImage.from_any(row["prompt"][0]["content"][0]["image"])
        wide = image.pil().resize((56 + 28 * (number % 2), 56))
        found.append(EncodedImage.from_any(wide))
    return found


def with_pictures(path: str, images: list[list[EncodedImage]], lengths: Any = LENGTHS, **fields: Any) -> Any:
    """A batch whose prompts hold these images, each with its placeholders, somewhere among the text."""
    given = batch(lengths=lengths[: len(images)], **fields)
    token = build_processor().image_token_id
    reader = AutoImageProcessor.from_pretrained(path)
    prompts = []
    for prompt, held in zip(given.prompts, images, strict=True):
        parts = [prompt[:2]]
        for image in held:
            grid = reader(images=[image.pil()])["image_grid_thw"][0]
            parts += [np.full(int(grid.prod()) // 4, token), prompt[2:4]]
        prompts.append(np.concatenate([*parts, prompt[2:]]))
    return given.replace(prompts=Ragged.from_rows(prompts, np.int32), images=tuple(map(tuple, images)))


def with_observed(path: str, given: Any, images: list[list[tuple[EncodedImage, int]]], stray: bool = False) -> Any:
    """The same batch whose responses hold these images too, in front of their tokens of these numbers, untrained;
    `stray`: a placeholder that stands for no image is the first token of each response, trained."""
    token, reader = build_processor().image_token_id, AutoImageProcessor.from_pretrained(path)
    flat = {name: given.responses.with_values(getattr(given, name)) for name in PER_TOKEN}
    rows: dict[str, list[Any]] = {name: [] for name in ("responses", *flat)}
    shown = []
    for i, response in enumerate(given.responses):
        row = {"responses": list(response)} | {name: list(values[i]) for name, values in flat.items()}
        if stray:
            row["responses"][0] = token
        placed = []
        for image, at in sorted(images[i], key=lambda one: -one[1]):
            count = int(reader(images=[image.pil()])["image_grid_thw"][0].prod()) // 4
            for name, values in row.items():
                values[at:at] = [token if name == "responses" else 0] * count
            placed = [PlacedImage.of(image, at), *(PlacedImage.of(one, one.at + count) for one in placed)]
        shown.append(tuple(placed))
        for name, values in row.items():
            rows[name].append(values)
    held = given.images or [()] * len(given)
    return given.replace(
        responses=Ragged.from_rows(rows["responses"], np.int32),
        images=tuple((*own, *more) for own, more in zip(held, shown, strict=True)),
        **{name: Ragged.from_rows(rows[name], getattr(given, name).dtype).values for name in flat},
    )


class Plain:
    """transformers' own model, called with one row after another of a batch."""

    def __init__(self, path: str, given: Any) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(path)
        self._reader, self._rows = AutoImageProcessor.from_pretrained(path), iter(range(len(given)))
        self._given = given

    def __call__(self, ids: torch.Tensor) -> Any:
        row = next(self._rows)
        images = self._given.images[row]
        if not images:
            return self.model(input_ids=ids)
        seen = self._reader(images=[image.pil() for image in images], return_tensors="pt")
        kinds, first = torch.zeros_like(ids), 0
        for image, grid in zip(images, seen["image_grid_thw"], strict=True):
            count = int(grid.prod()) // 4
            if isinstance(image, PlacedImage):
                first = len(self._given.prompts[row]) + image.at
            for _ in range(count):
                first += int((ids[0, first:] == self.model.config.image_token_id).int().argmax())
                kinds[0, first] = 1
                first += 1
        self.model.model.get_placeholder_mask = lambda _, inputs_embeds, **__: (
            kinds.bool()[..., None].expand_as(inputs_embeds),
            torch.zeros_like(inputs_embeds, dtype=torch.bool),
        )
        return self.model(input_ids=ids, mm_token_type_ids=kinds, **seen)
