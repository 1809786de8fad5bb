"""Images of a micro-batch, as the forward of a vision-language model takes them.

The families of Qwen-VL: `pixel_values` and `image_grid_thw` by the checkpoint's own processor, positions in three
dimensions by the model's own `get_rope_index`, computed for each sequence apart, so that packing changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rlbench.data.base.ragged import offsets_of
from rlbench.data.batches.batch import TrainBatch
from rlbench.data.prompts.images import EncodedImage
from rlbench.data.texts.image_pixels import PixelReader
from rlbench.data.texts.media_features import placeholders_at, shown_at
from rlbench.errors import DataError
from rlbench.nn.huggingface import BaseHuggingFaceTrainModule
from rlbench.trainers.passes.packing import ModelInputs


class ImageReader:
    """Of one model; its processor is loaded when an image first arrives."""

    name = "image"

    def __init__(self, module: Any) -> None:
        self._module = module
        self._merge = int(module.config.vision_config.spatial_merge_size)
        self._token = int(module.config.image_token_id)
        self._pixels = PixelReader(partial(_processor_of, module))

    @classmethod
    def of(cls, module: nn.Module) -> ImageReader | None:
        """Return that of a vision-language model, None of another."""
        config = getattr(module, "config", None)
        placed = hasattr(getattr(module, "model", None), "get_rope_index") and hasattr(config, "image_token_id")
        return cls(module) if placed and hasattr(config, "vision_config") else None

    @staticmethod
    def held(batch: TrainBatch) -> bool:
        """Whether the batch has any."""
        return batch.has_images

    def check(self, batch: TrainBatch) -> None:
        """Refuse rows that have no placeholder tokens where their images stand, by the images' sizes, or have those of
        two images side by side, which `get_rope_index` takes for one."""
        for row, images in enumerate(batch.images or ()):
            places = np.concatenate([batch.prompts[row], batch.responses[row]]) == self._token
            try:
                shown = shown_at(
                    places, images, [self._pixels.tokens(image) for image in images], len(batch.prompts[row])
                )
                runs = int(np.diff(shown.astype(np.int8), prepend=0).clip(0).sum())
                if runs != len(images):
                    raise DataError(
                        f"has {len(images)} images in {runs} runs of image tokens, and something has to stand between "
                        "two, as their beginnings and ends do"
                    )
            except DataError as error:
                raise DataError(
                    f"sequence {row} {error}: give the tokens as the sampler used them, each image's placeholder "
                    "expanded"
                ) from None

    def placed(self, inputs: ModelInputs, rows: TrainBatch, packed: bool) -> ModelInputs:
        """Return the layout with the rows' images; where there are none with a blank one behind all rows, which no
        row sees: the tower runs as it does on other ranks, and its gradient is zero."""
        images: list[Sequence[EncodedImage | None]] = list(rows.images or [()] * len(rows))
        prompts = rows.prompts.lengths.tolist()
        read = [[self._pixels.read(image) for image in own] for own in rows.images or [()] * len(rows)]
        if not any(read):
            patches = torch.zeros(self._merge**2, patch_numbers(self._module))
            blank = patches, torch.tensor([1, self._merge, self._merge])
            inputs = with_one_more(inputs, self._token, packed)
            images, prompts, read = [*images, (None,)], [*prompts, 0], [*read, [blank]]
        device, ids = inputs.input_ids.device, inputs.input_ids.cpu()
        spans = spans_of(inputs, packed)
        places = inputs.position_ids.cpu().expand(3, *ids.shape).clone()
        held = torch.zeros_like(ids, dtype=torch.bool)
        for (row, span), pixels, shown, prompt in zip(spans, read, images, prompts, strict=True):
            if pixels:
                own, grids = ids[row, span], torch.stack([grid for _, grid in pixels])
                counts = (grids.prod(-1) // self._merge**2).tolist()
                here = torch.from_numpy(shown_at((own == self._token).numpy(), shown, counts, prompt))
                held[row, span] = here
                found, _ = self._module.model.get_rope_index(own[None], here[None].int(), image_grid_thw=grids)
                places[:, row, span] = found[:, 0]
        flat = [one for pixels in read for one in pixels]
        given = {"pixel_values": torch.cat([patches for patches, _ in flat]).to(device)}
        given["image_grid_thw"] = torch.stack([grid for _, grid in flat]).to(device)
        sampled = not torch.equal(held, ids == self._token)
        return replace(
            inputs, position_ids=places.to(device), media=given, placeholders=held.to(device) if sampled else None
        )

    def placing(self, inputs: ModelInputs) -> AbstractContextManager[None]:
        """Have the model take as placeholders those of the images alone, where a policy sampled the token too."""
        if inputs.placeholders is None:
            return nullcontext()
        return placeholders_at(self._module.model, inputs.placeholders)


def patch_numbers(module: Any) -> int:
    """Return the numbers in one patch of a picture, as a model that sees takes it."""
    vision = module.config.vision_config
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)


def _processor_of(module: Any) -> Any:
    """Load the checkpoint's own processor of images."""
    from transformers import AutoImageProcessor

    source = BaseHuggingFaceTrainModule.materialization_source(module)  # not where its weights come from
    return AutoImageProcessor.from_pretrained(source, revision=getattr(module, "_source_revision", None))


def spans_of(inputs: ModelInputs, packed: bool) -> list[tuple[int, slice]]:
    """Where each sequence lies in the layout: its row, and the columns there."""
    if not packed:
        return [(row, slice(0, length)) for row, length in enumerate(inputs.lengths)]
    ends = offsets_of(np.asarray(inputs.lengths, np.int64)).tolist()
    return [(0, slice(start, end)) for start, end in itertools.pairwise(ends)]


def with_one_more(inputs: ModelInputs, token: int, packed: bool, count: int = 1) -> ModelInputs:
    """Return the layout with a sequence behind the others, of a token `count` times; no row is shorter than it."""
    width = count if packed else inputs.input_ids.shape[1]
    more, places = inputs.input_ids.new_zeros(1, width), inputs.position_ids.new_zeros(1, width)
    more[0, :count] = token
    places[0, :count] = torch.arange(count, device=places.device)
    side = 1 if packed else 0
    mask = inputs.attention_mask
    if mask is not None:
        last = mask.new_zeros(1, width)
        last[0, :count] = 1
        mask = torch.cat([mask, last])
    return replace(
        inputs,
        input_ids=torch.cat([inputs.input_ids, more], side),
        position_ids=torch.cat([inputs.position_ids, places], side),
        attention_mask=mask,
        lengths=[*inputs.lengths, count],
    )
