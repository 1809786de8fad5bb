"""Videos as a model of Qwen2.5-VL's kind computes with them: the frames that its checkpoint's own processor takes.

Replica and ranks choose and decode frames here, and their processors choose none any more: both see the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.prompts.videos import EncodedVideo
from rlbench.data.texts.media_features import FeatureReader
from rlbench.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

WATCHING = ("qwen2_5_vl",)
"""Families whose videos are read here; of others that see, images alone."""
NO_MORE_SAMPLING = {"do_sample_frames": False}
"""Of a processor's call, for frames that are chosen."""


@dataclass(frozen=True, eq=False)
class SampledFrames:
    """`pixels`: (n, height, width, 3) uint8; `told`: of them, as transformers' `VideoMetadata` and vLLM take it;
    `seconds`: that one step of the model's lasts.

    Positions in time are computed from `seconds` in double precision, by transformers on the ranks and by vLLM: the
    single precision that transformers' processor gives drops another fraction here and there than vLLM does.
    """

    pixels: np.ndarray
    told: dict[str, Any]
    seconds: float


class VideoReader(FeatureReader[EncodedVideo]):
    """Of videos: patches (n, numbers) float32, and the grid with how many seconds one of its steps lasts, (4,)
    float64."""

    def tokens(self, video: EncodedVideo) -> int:
        """Return how many tokens a video takes, by its size where that is all its processor goes by."""
        if getattr(self.processor, "cap_pixels_per_frame", None):
            patches = int(self.read(video)[1][:3].prod())
        else:
            count = len(frame_indices(video, self.processor))
            patches = int(self.processor.get_num_of_video_patches(count, video.height, video.width, {}))
        return patches // int(self.processor.merge_size) ** 2

    def made(self, one: EncodedVideo) -> tuple[Tensor, Tensor]:
        """Compute what `read` keeps."""
        import torch
        from transformers.video_utils import VideoMetadata

        sampled = sampled_frames(one, self.processor)
        told = VideoMetadata(**sampled.told)
        features = self.processor(
            videos=[sampled.pixels], video_metadata=[told], return_tensors="pt", **NO_MORE_SAMPLING
        )
        step = torch.tensor([sampled.seconds], dtype=torch.float64)
        return features["pixel_values_videos"], torch.cat([features["video_grid_thw"][0].double(), step])


def sampled_frames(video: EncodedVideo, processor: Any) -> SampledFrames:
    """Return the frames that a model is shown. DataError where the video is broken, or too large to decode."""
    indices = frame_indices(video, processor)
    told = {
        "total_num_frames": video.frames,
        "fps": video.fps,
        "duration": video.seconds,
        "frames_indices": indices.tolist(),
        "width": video.width,
        "height": video.height,
        "video_backend": "opencv",
    }
    rate = len(indices) / video.frames * video.fps
    return SampledFrames(video.pixels(indices), told, processor.temporal_patch_size / rate)


def frame_indices(video: EncodedVideo, processor: Any) -> np.ndarray:
    """Return which frames of a video its model is shown, (n,) int64, ascending: by what the prompt asks for, else as
    the checkpoint's own processor would, by the processor's own rule. DataError where that gives none."""
    from transformers.video_utils import VideoMetadata

    whole, asked = np.arange(video.frames), video.sampling.asked
    if not asked and not processor.do_sample_frames:
        return whole
    if asked.keys() <= {"max_frames"} and not (processor.do_sample_frames and (processor.fps or processor.num_frames)):
        if video.frames <= asked["max_frames"]:
            return whole
        asked = {"num_frames": asked["max_frames"]}
    if video.frames < processor.temporal_patch_size:
        return whole  # fewer than one step in time, of which its rule makes none
    told = VideoMetadata(total_num_frames=video.frames, fps=video.fps, duration=video.seconds)
    try:
        chosen = processor.sample_frames(metadata=told, **asked)
    except (ValueError, ZeroDivisionError) as error:
        raise DataError(f"the video {video} cannot be sampled by {asked}: {error}") from error
    return np.asarray(chosen, np.int64)
