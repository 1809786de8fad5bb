"""Images and videos of a micro-batch, as the forward of a vision-language model takes them.

The families of Qwen-VL: `pixel_values` and `image_grid_thw`, of videos `pixel_values_videos` and `video_grid_thw`, by
the checkpoint's own processors; positions in three dimensions by the model's own `get_rope_index`, computed for each
sequence apart, so that packing changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.data.base.ragged import offsets_of
from rlbench.data.batches.batch import TrainBatch
from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.placing import IMAGE, VIDEO, MediaKind
from rlbench.data.texts.image_pixels import PixelReader
from rlbench.data.texts.media_features import placeholders_at, shown_at
from rlbench.data.texts.video_frames import WATCHING, VideoReader
from rlbench.errors import DataError
from rlbench.nn.huggingface import BaseHuggingFaceTrainModule
from rlbench.trainers.passes.packing import ModelInputs

Read = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class _Seen:
    """How a model takes what is of one kind. `token`: of its placeholder; `number`: of the kind among those of
    `get_rope_index`; `reader`: makes its patches; `pixels`, `grids`: what the forward calls them."""

    kind: MediaKind[Any]
    token: int
    number: int
    reader: Any
    pixels: str
    grids: str


class ImageReader:
    """Of one model; its processors are loaded when an image, or a video, first arrives."""

    def __init__(self, module: Any) -> None:
        self._module, config = module, module.config
        self._merge = int(config.vision_config.spatial_merge_size)
        pixels = PixelReader(partial(_processor_of, module, "AutoImageProcessor"))
        self._seen = {"images": _Seen(IMAGE, int(config.image_token_id), 1, pixels, "pixel_values", "image_grid_thw")}
        if config.model_type in WATCHING:
            frames = VideoReader(partial(_processor_of, module, "AutoVideoProcessor"))
            names = "pixel_values_videos", "video_grid_thw"
            self._seen["videos"] = _Seen(VIDEO, int(config.video_token_id), 2, frames, *names)

    @classmethod
    def of(cls, module: nn.Module) -> ImageReader | None:
        """Return that of a vision-language model, None of another."""
        config = getattr(module, "config", None)
        placed = hasattr(getattr(module, "model", None), "get_rope_index") and hasattr(config, "image_token_id")
        return cls(module) if placed and hasattr(config, "vision_config") else None

    @property
    def takes(self) -> tuple[str, ...]:
        """The fields of a batch that it reads."""
        return tuple(self._seen)

    def check(self, batch: TrainBatch) -> None:
        """Refuse rows that have no placeholder tokens where their images and videos stand, by their sizes, or have
        those of two side by side, which `get_rope_index` takes for one."""
        for name, seen in self._seen.items():
            for row, held in enumerate(getattr(batch, name) or ()):
                places = np.concatenate([batch.prompts[row], batch.responses[row]]) == seen.token
                try:
                    counts = [seen.reader.tokens(one) for one in held]
                    shown = shown_at(places, held, counts, len(batch.prompts[row]), seen.kind.name)
                    runs = int(np.diff(shown.astype(np.int8), prepend=0).clip(0).sum())
                    if runs != len(held):
                        raise DataError(
                            f"has {len(held)} {name} in {runs} runs of {seen.kind.name} tokens, and something has to "
                            "stand between two, as their beginnings and ends do"
                        )
                except DataError as error:
                    raise DataError(
                        f"sequence {row} {error}: give the tokens as the sampler used them, each {seen.kind.name}'s "
                        "placeholder expanded"
                    ) from None

    def placed(
        self, inputs: ModelInputs, rows: TrainBatch, packed: bool, there: Collection[str] = ("images",)
    ) -> ModelInputs:
        """Return the layout with the rows' images and videos, of those fields of a batch that are `there` on some rank.
        Where a field has none here, a blank one stands behind all rows, which no row sees: the tower runs as it does on
        other ranks, and its gradient is zero."""
        held = {name: _Held.of(seen, rows, name) for name, seen in self._seen.items() if name in there}
        prompts = rows.prompts.lengths.tolist()
        for name, own in held.items():
            if not any(own.read):
                inputs = with_one_more(inputs, own.seen.token, packed)
                prompts = [*prompts, 0]
                held = {other: more.with_row(self._blank() if other == name else None) for other, more in held.items()}
        device, ids = inputs.input_ids.device, inputs.input_ids.cpu()
        places = inputs.position_ids.cpu().expand(3, *ids.shape).clone()
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        stray = torch.zeros_like(ids, dtype=torch.bool)
        for number, (row, span) in enumerate(spans_of(inputs, packed)):
            for own in held.values():
                here = own.at(number, ids[row, span], prompts[number], self._merge)
                kinds[row, span][here] = own.seen.number
                stray[row, span] |= (ids[row, span] == own.seen.token) & ~here
            if any(own.read[number] for own in held.values()):
                places[:, row, span] = self._positions(ids[row, span], kinds[row, span], held, number)
        given = {name: tensor for own in held.values() for name, tensor in own.given(device).items()}
        return replace(
            inputs,
            position_ids=places.to(device),
            media=given,
            placeholders=kinds.to(device) if stray.any() else None,
        )

    def _positions(self, ids: Tensor, kinds: Tensor, held: Mapping[str, _Held], number: int) -> Tensor:
        """Return the positions of one sequence, (3, T)."""
        grids: dict[str, Any] = {}
        for own in held.values():
            facts = [fact for _, fact in own.read[number]]
            grids[own.seen.grids] = torch.stack(facts)[:, :3].long() if facts else None
            if own.seen.kind is VIDEO and facts:
                grids["second_per_grid_ts"] = [fact[3] for fact in facts]
        found, _ = self._module.model.get_rope_index(ids[None], kinds[None], **grids)
        return behind_videos(found[:, 0], kinds)

    def _blank(self) -> Read:
        """Return the patches of a picture that holds nothing, and its grid."""
        patches = torch.zeros(self._merge**2, patch_numbers(self._module))
        return patches, torch.tensor([1, self._merge, self._merge, 1])

    def placing(self, inputs: ModelInputs) -> AbstractContextManager[None]:
        """Have the model take as placeholders those of the images alone, where a policy sampled the token too."""
        if inputs.placeholders is None:
            return nullcontext()
        return placeholders_at(self._module.model, inputs.placeholders)


@dataclass(frozen=True, eq=False)
class _Held:
    """What is of one kind in each row: `shown`, and what its reader makes of each, `read`."""

    seen: _Seen
    shown: list[Sequence[EncodedMedia | None]]
    read: list[list[Read]]

    @classmethod
    def of(cls, seen: _Seen, rows: TrainBatch, name: str) -> _Held:
        """Read that of a micro-batch."""
        shown = list(getattr(rows, name) or [()] * len(rows))
        return cls(seen, shown, [[seen.reader.read(one) for one in own] for own in shown])

    def with_row(self, blank: Read | None) -> _Held:
        """Return it with a row behind the others, which holds a blank one, or none."""
        more: list[Read] = [] if blank is None else [blank]
        return replace(self, shown=[*self.shown, (None,) * len(more)], read=[*self.read, more])

    def at(self, row: int, ids: Tensor, prompt: int, merge: int) -> Tensor:
        """Return which tokens of a row are its own, (T,) bool."""
        counts = [int(facts[:3].prod()) // merge**2 for _, facts in self.read[row]]
        places = (ids == self.seen.token).numpy()
        return torch.from_numpy(shown_at(places, self.shown[row], counts, prompt, self.seen.kind.name))

    def given(self, device: torch.device) -> dict[str, Tensor]:
        """Return what the forward takes of it."""
        flat = [one for own in self.read for one in own]
        grids = torch.stack([facts[:3].long() for _, facts in flat])
        return {
            self.seen.pixels: torch.cat([patches for patches, _ in flat]).to(device),
            self.seen.grids: grids.to(device),
        }


def behind_videos(places: Tensor, kinds: Tensor) -> Tensor:
    """Return positions (3, T) in which what follows a video goes on behind its last step in time, as the checkpoints
    were trained and as vLLM has it; transformers (5.3 to 5.19) goes on behind its longer edge.

    Args:
        kinds: (T,), 2 at the tokens of videos.
    """
    places = places.clone()
    video = torch.nn.functional.pad((kinds == 2).int(), (1, 1)).diff()
    for start, end in zip((video == 1).nonzero()[:, 0].tolist(), (video == -1).nonzero()[:, 0].tolist(), strict=True):
        if end < len(kinds):
            places[:, end:] += places[:, start:end].max() + 1 - places[0, end]
    return places


def patch_numbers(module: Any) -> int:
    """Return the numbers in one patch of a picture, as a model that sees takes it."""
    vision = module.config.vision_config
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)


def _processor_of(module: Any, kind: str) -> Any:
    """Load the checkpoint's own processor, by transformers' class for any of this kind."""
    import transformers

    source = BaseHuggingFaceTrainModule.materialization_source(module)  # not where its weights come from
    return getattr(transformers, kind).from_pretrained(source, revision=getattr(module, "_source_revision", None))


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
