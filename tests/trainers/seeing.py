"""A random Qwen2.5-VL on disk, batches with pictures, and the same forward by transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoImageProcessor, Qwen2_5_VLForConditionalGeneration

import rlbench.nn
from rlbench.data.base.ragged import Ragged
from rlbench.data.prompts.images import EncodedImage
from rlbench.tiny import vision
from rlbench.tiny.vision_model import build_model, build_processor
from tests.trainers.policy_reference import batch

LENGTHS = [(5, 4), (9, 6), (7, 5), (12, 3), (6, 7), (8, 2)]
VOCAB = 96


class TrainedEyes(rlbench.nn.HuggingFaceFsdp2TrainModule, Qwen2_5_VLForConditionalGeneration):
    def on_weights_materialized(self) -> None:
        self.optimizer = self.strategy.create_optimizer(self, lr=1e-2, weight_decay=0.0)


def save_eyes(folder: Path) -> str:
    """The tiny model before its warm-up, with weights large enough that all of them count."""
    processor = build_processor()
    model = build_model(processor, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def on_meta(path: str) -> Any:
    with rlbench.nn.device("meta"):
        return TrainedEyes.from_pretrained(path)


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


class Plain:
    """transformers' own model, called with one row after another of a batch."""

    def __init__(self, path: str, given: Any) -> None:
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(path)
        self._reader, self._rows = AutoImageProcessor.from_pretrained(path), iter(given.images)

    def __call__(self, ids: torch.Tensor) -> Any:
        images = next(self._rows)
        if not images:
            return self.model(input_ids=ids)
        seen = self._reader(images=[image.pil() for image in images], return_tensors="pt")
        kinds = (ids == self.model.config.image_token_id).int()
        return self.model(input_ids=ids, mm_token_type_ids=kinds, **seen)
