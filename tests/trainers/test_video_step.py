"""A step on videos equals the same step by transformers in one process, however it is split over ranks and packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlbench.data.base.ragged import Ragged
from rlbench.data.prompts.videos import EncodedVideo
from rlbench.errors import DataError
from rlbench.trainers.passes.images import behind_videos
from rlbench.trainers.passes.sounds import media_reader
from tests.ranks import ranks
from tests.trainers.policy_reference import GRPO, assert_gradients, by_hand, forward_backward
from tests.trainers.seeing import LENGTHS, build_eyes, on_meta, pictures, save_eyes
from tests.watching import Plain, moving, positions, video, with_media

pytestmark = pytest.mark.slow

LONG, WIDE, SHORT = video(7, 2.5), video(4, 25.0, seed=1, width=84), video(1, 1.0, seed=2)
PICTURE = pictures(1)[0]


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_eyes(tmp_path_factory.mktemp("watches"))


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(1, {}), (1, {"packing": False, "head": "plain"}), (2, {"token_budget": 60}), (2, {"packing": False})],
)
def test_gradient_and_metrics_are_those_of_one_plain_process(
    eyes: str, world_size: int, options: dict[str, Any]
) -> None:
    media = [[LONG], [], [WIDE, PICTURE, LONG], [PICTURE], [], [SHORT]]
    given = with_media(eyes, media, LENGTHS, stray=bool(options))
    plain = Plain(eyes, given)
    total, expected = by_hand(plain, given, GRPO, "token-mean")
    total.backward()
    assert plain.model.model.visual.patch_embed.proj.weight.grad.abs().max() > 1e-5
    with ranks(world_size, on_meta(eyes)) as engine:
        results = forward_backward(engine, given, **options)
        assert_gradients(engine, plain.model, atol=1e-5)
    for name, value in expected.items():
        assert results[0]["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("packing", [True, False])
def test_a_rank_with_videos_beside_one_with_pictures_and_one_beside_none(eyes: str, packing: bool) -> None:
    given = with_media(eyes, [[LONG], [PICTURE]], [(9, 6), (9, 6)])
    plain = Plain(eyes, given)
    by_hand(plain, given, GRPO, "token-mean")[0].backward()
    with ranks(2, on_meta(eyes)) as engine:
        results = forward_backward(engine, given, packing=packing)
        assert_gradients(engine, plain.model, atol=1e-5)
        forward_backward(engine, given.rows([0]), packing=packing)  # one has a video, one no row
        assert sorted(len(result["rows"]) for result in results) == [1, 1]

        short = given.replace(videos=(given.videos[0] * 2, ()))
        with pytest.raises(DataError, match="16 video tokens, its 2 videos 32"):
            forward_backward(engine, short)
        prompt = [int(token) for token in given.prompts[0]]
        run = [token for token in prompt if prompt.count(token) == 16]
        side_by_side = Ragged.from_rows([[*run, *run, *prompt[-2:]], list(given.prompts[1])], np.int32)
        with pytest.raises(DataError, match="2 videos in 1 runs of video tokens"):
            forward_backward(engine, given.replace(prompts=side_by_side, videos=(given.videos[0] * 2, ())))


@pytest.mark.parametrize("fps", [3.0, 8.231707317073171, 12.666666666666666, 55.0])
def test_steps_stand_in_time_where_vllm_places_them(fps: float) -> None:
    """Products of these rates lie next to whole numbers, where single and double precision drop other fractions."""
    model, processor = build_eyes("qwen2_5_vl", 0)
    frames, token = 280, processor.video_token_id
    ids = [5, *[token] * (frames // 2 * 4), 6, 7]
    kinds = torch.tensor([0, *[2] * (frames // 2 * 4), 0, 0])
    seconds = torch.tensor([2 / fps], dtype=torch.float64)
    grid = torch.tensor([[frames // 2, 4, 4]])
    found, _ = model.model.get_rope_index(
        torch.tensor([ids]), kinds[None], video_grid_thw=grid, second_per_grid_ts=[seconds[0]]
    )
    ours = behind_videos(found[:, 0], kinds)
    pace = model.config.vision_config.tokens_per_second
    steps = (np.indices((frames // 2, 2, 2))[0] * (float(seconds) * pace)).astype(np.int64)  # as vLLM computes them
    assert (ours[0, 1:-2] - 1).tolist() == steps.reshape(-1).tolist()
    assert ours[:, -2].tolist() == [max(steps.max(), 1) + 2] * 3 and ours[:, -1].tolist() == (ours[:, -2] + 1).tolist()
    told = {"video_grid_thw": grid, "second_per_grid_ts": seconds}
    assert torch.equal(ours, positions(model.config, ids, kinds.tolist(), told)[:, 0])


def test_a_model_that_sees_without_watching_and_one_of_text_refuse_videos(tmp_path: Any, qwen: str, eyes: str) -> None:
    from tests.modules import qwen_on_meta

    assert media_reader(build_eyes("qwen3_vl", 0)[0]).takes == ("images",)  # type: ignore[union-attr]
    given = with_media(eyes, [[LONG], []], LENGTHS)
    few = given.replace(prompts=Ragged.from_rows([[1, 2], [3]], np.int32))
    with (
        ranks(1, qwen_on_meta(qwen)) as engine,
        pytest.raises(DataError, match=r"prompts have videos, and .*watches none"),
    ):
        forward_backward(engine, few)


def test_tokens_of_a_video_are_counted_by_its_size_and_where_that_is_not_enough_by_its_pixels() -> None:
    from transformers import Qwen2VLVideoProcessor

    from rlbench.data.texts.video_frames import VideoReader

    size = {"shortest_edge": 56 * 56, "longest_edge": 64 * 28 * 28}
    for cap in (None, True):
        processor = Qwen2VLVideoProcessor(size=size, cap_pixels_per_frame=cap, max_video_tokens=100)
        for one in (LONG, WIDE, SHORT, EncodedVideo.from_any((moving(20, 200, 300), 5.0))):
            reader = VideoReader(lambda given=processor: given)
            counted = reader.tokens(one)
            assert counted == int(reader.read(one)[1][:3].prod()) // 4 == len(reader.read(one)[0]) // 4
