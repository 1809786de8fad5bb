"""Videos for tests: frames that move, files that OpenCV writes, and what transformers makes of both."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from rlbench.data import EncodedImage, EncodedVideo, Prompt
from rlbench.data.base.ragged import Ragged
from tests.trainers.policy_reference import batch

PLACE = {"type": "video"}
ASKED = [{"role": "user", "content": [PLACE, {"type": "text", "text": "what?"}]}]
KINDS = {"mp4": "mp4v", "mkv": "FFV1", "avi": "MJPG"}


def moving(count: int, width: int = 56, height: int = 56, seed: int = 0) -> np.ndarray:
    """Frames of noise over which a bright bar goes, (count, height, width, 3) uint8."""
    frames = np.random.default_rng(seed).integers(0, 90, (count, height, width, 3), np.uint8)
    for number, frame in enumerate(frames):
        frame[:, (number * 9) % width : (number * 9) % width + 8] += 150
    return frames


def video(count: int, fps: float = 2.0, seed: int = 0, **size: int) -> EncodedVideo:
    """Such frames as a prompt holds them."""
    return EncodedVideo.from_any((moving(count, seed=seed, **size), fps))


def file_of(frames: np.ndarray, fps: float = 25.0, kind: str = "mp4") -> bytes:
    """Encode frames; "mkv" keeps them to the last bit."""
    import cv2

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{kind}"
        writer = cv2.VideoWriter(
            str(path), cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*KINDS[kind]), fps, frames.shape[2:0:-1]
        )
        for frame in frames:
            writer.write(np.ascontiguousarray(frame[..., ::-1]))
        writer.release()
        return path.read_bytes()


def positions(config: Any, ids: list[int], kinds: list[int], given: dict[str, Any]) -> torch.Tensor:
    """Positions (3, 1, T) by the rule of Qwen2.5-VL's authors, as its checkpoints were trained and vLLM has it: what
    follows a picture or a video goes on behind its highest position. transformers (5.3 to 5.19) goes on behind its
    longer edge, which is lower where a video lasts."""
    merge, rows, at = config.vision_config.spatial_merge_size, [], 0
    pictures, seconds = iter(given.get("image_grid_thw", ())), iter(given.get("second_per_grid_ts", ()))
    clips = iter(given.get("video_grid_thw", ()))
    while len(rows) < len(ids):
        kind = kinds[len(rows)]
        if kind == 0:
            rows.append((at, at, at))
        else:
            steps, high, wide = map(int, next(pictures) if kind == 1 else next(clips))
            pace = 0.0 if kind == 1 else float(next(seconds)) * config.vision_config.tokens_per_second
            grid = [
                (int(t * pace), h, w) for t in range(steps) for h in range(high // merge) for w in range(wide // merge)
            ]
            rows += [(at + t, at + h, at + w) for t, h, w in grid]
        at = max(map(max, rows)) + 1
    return torch.tensor(rows).T[:, None]


def given(processor: Any, text: str, prompt: Prompt, **sampling: Any) -> dict[str, torch.Tensor]:
    """What transformers' own processor of Qwen2.5-VL makes of a text and what stands in it."""
    pictures = [image.pil() for image in prompt.images] or None
    shown = [one.pixels(range(one.frames)) for one in prompt.videos] or None
    told = [
        {"total_num_frames": v.frames, "fps": v.fps, "frames_indices": list(range(v.frames))} for v in prompt.videos
    ]
    more: dict[str, Any] = {"videos": shown, "video_metadata": told, **sampling} if shown else {}
    return dict(processor(text=[text], images=pictures, return_tensors="pt", **more))


def with_media(path: str, media: list[list[Any]], lengths: Any, stray: bool = False) -> Any:
    """A batch whose prompts hold these pictures and videos, in their order, each with its placeholders, somewhere among
    the text; `stray`: the first tokens of each response are placeholders that stand for nothing."""
    given = batch(lengths=lengths[: len(media)])
    processor = AutoProcessor.from_pretrained(path)
    prompts = []
    for prompt, held in zip(given.prompts, media, strict=True):
        parts = [prompt[:2]]
        for one in held:
            seen = of_reader(processor, [one])
            grid = next(iter(seen[name] for name in seen if "grid_thw" in name))[0]
            token = processor.image_token_id if isinstance(one, EncodedImage) else processor.video_token_id
            parts += [np.full(int(grid.prod()) // 4, token), prompt[2:4]]
        prompts.append(np.concatenate([*parts, prompt[2:]]))
    responses = [list(row) for row in given.responses]
    for row in responses if stray else ():
        row[:2] = processor.video_token_id, processor.image_token_id
    kinds = {"images": EncodedImage, "videos": EncodedVideo}
    held_of = {
        name: tuple(tuple(o for o in own if isinstance(o, kind)) for own in media) for name, kind in kinds.items()
    }
    return given.replace(
        prompts=Ragged.from_rows(prompts, np.int32), responses=Ragged.from_rows(responses, np.int32), **held_of
    )


def of_reader(processor: Any, media: list[Any]) -> dict[str, Any]:
    """What the checkpoint's own processors make of pictures and videos."""
    pictures = [one.pil() for one in media if isinstance(one, EncodedImage)]
    shown = [one for one in media if isinstance(one, EncodedVideo)]
    found = dict(processor.image_processor(images=pictures, return_tensors="pt")) if pictures else {}
    if shown:
        frames = [one.pixels(range(one.frames)) for one in shown]
        found |= dict(processor.video_processor(videos=frames, return_tensors="pt"))
        found["second_per_grid_ts"] = [2 / one.fps for one in shown]
    return found


class Plain:
    """transformers' own model, called with one row after another of a batch."""

    def __init__(self, path: str, given: Any) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(path)
        self._processor, self._rows, self._given = AutoProcessor.from_pretrained(path), iter(range(len(given))), given

    def __call__(self, ids: torch.Tensor) -> Any:
        row = next(self._rows)
        config, prompt = self.model.config, len(self._given.prompts[row])
        seen = of_reader(self._processor, [*self._given.images[row], *self._given.videos[row]])
        kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        kinds[:, prompt:] = 0
        places = positions(config, ids[0].tolist(), kinds[0].tolist(), seen)
        seen.pop("second_per_grid_ts", None)
        self.model.model.get_placeholder_mask = lambda _, inputs_embeds, **__: tuple(
            (kinds == number)[..., None].expand_as(inputs_embeds) for number in (1, 2)
        )
        return self.model(input_ids=ids, position_ids=places, **seen)
