"""Videos of prompts: what is taken, in every form that people write them, and what hostile input meets."""

from __future__ import annotations

import base64
import io
import pickle
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

import rlbench as rb
from rlbench.data import EncodedVideo, Rollouts, TrainBatch, as_prompts
from rlbench.data.prompts import video_files, videos
from rlbench.data.texts.video_frames import frame_indices
from rlbench.errors import DataError
from rlbench.rewards.reward_model import refuse_videos
from rlbench.session.training.reward_steps import up_to_the_end
from tests.data.values import rollouts
from tests.watching import ASKED, PLACE, file_of, moving

FRAMES = moving(7, 64, 48)
MP4 = file_of(FRAMES, 5.0)
VIDEO = EncodedVideo.from_any(MP4)
BASE64 = base64.b64encode(MP4).decode()


def asked(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": MP4},
        {"type": "video", "video": {"bytes": MP4, "path": None}},
        {"type": "video", "video": f"data:video/mp4;base64,{BASE64}"},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{BASE64}"}},
    ],
)
def test_each_form_of_a_part_becomes_a_placeholder_and_one_video(part: dict[str, Any]) -> None:
    (prompt,) = as_prompts([asked(part)])
    assert prompt.content == ASKED and prompt.videos == (VIDEO,) == prompt.media and not prompt.images
    assert prompt.text == "[video] what?"
    assert (VIDEO.frames, VIDEO.fps, VIDEO.width, VIDEO.height, VIDEO.seconds) == (7, 5.0, 64, 48, 1.4)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "videos": [MP4]},
        {"prompt": ASKED, "video": {"bytes": MP4, "path": None}},
        {"prompt": [{"role": "user", "content": "<video>what?"}], "video": MP4},
        {"prompt": [{"role": "user", "content": "what?"}], "multi_modal_data": {"video": MP4}},
    ],
)
def test_videos_beside_a_chat_stand_at_its_places_its_marks_or_in_front(row: dict[str, Any]) -> None:
    (prompt,) = as_prompts([row | {"label": "a", "id": 3}])
    assert (prompt.content, prompt.videos, prompt.label, dict(prompt.meta)) == (ASKED, (VIDEO,), "a", {"id": 3})
    (loaded,) = rb.data.load([row]) if "multi_modal_data" not in row else [prompt]
    assert (loaded.content, loaded.videos) == (ASKED, (VIDEO,))


@pytest.mark.parametrize(
    "held",
    [
        (FRAMES, 2.5),
        [FRAMES, 2.5],
        {"frames": FRAMES, "fps": 2.5},
        (FRAMES, {"fps": 2.5, "total_num_frames": 7}),
        {"video": [Image.fromarray(frame) for frame in FRAMES], "fps": 2.5},
        (list(FRAMES), 2.5),
    ],
)
def test_frames_with_their_rate_come_back_to_the_last_bit(held: Any) -> None:
    (prompt,) = as_prompts({"prompt": ASKED, "videos": held if isinstance(held, dict) else [held]})
    (one,) = prompt.videos
    assert one == EncodedVideo.from_any((FRAMES, 2.5)) and one.fps == 2.5 and one.frames == 7
    assert np.array_equal(one.pixels(range(7)), FRAMES) and np.array_equal(
        one.pixels([0, 3, 3, 6]), FRAMES[[0, 3, 3, 6]]
    )
    (alone,) = as_prompts({"prompt": ASKED, "videos": held})
    assert alone.videos == prompt.videos


def test_files_are_decoded_by_frame_and_a_lossless_one_to_the_last_bit() -> None:
    mkv, avi = EncodedVideo.from_any(file_of(FRAMES, 5.0, "mkv")), EncodedVideo.from_any(file_of(FRAMES, 5.0, "avi"))
    assert np.abs(mkv.pixels(range(7)).astype(int) - FRAMES).max() <= 2  # YUV and back
    assert mkv.frames == avi.frames == 7 and mkv.data_url.startswith("data:video/x-matroska;base64,")
    near = VIDEO.pixels([1, 4]).astype(int)
    assert near.shape == (2, 48, 64, 3)
    errors = [[np.abs(one - frame).mean() for frame in FRAMES] for one in near]
    assert np.argmin(errors, 1).tolist() == [1, 4]  # red is red, and each is the frame asked for


def test_a_path_and_the_video_column_of_a_dataset_are_read_without_decoding(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes(MP4)
    assert EncodedVideo.from_any(path) == EncodedVideo.from_any(str(path)) == VIDEO
    table = datasets.Dataset.from_dict({"prompt": ["what?"], "video": [str(path)], "label": [1]})
    (prompt,) = rb.data.load(table.cast_column("video", datasets.Video()), chat=True)
    assert (prompt.content, prompt.videos) == (ASKED, (VIDEO,))
    (named,) = rb.data.load([{"prompt": "what?", "clip": str(path)}], videos="clip", chat=True)
    assert named.videos == (VIDEO,) and "clip" not in named.meta


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"fps": 1.0}, {"num_frames": 6}, {"max_frames": 4}, {"fps": 4, "max_frames": 8}]
)
def test_frames_are_chosen_as_the_checkpoints_own_processor_does(samples: bool, options: dict[str, Any]) -> None:
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

    processor = Qwen3VLVideoProcessor() if samples else Qwen2VLVideoProcessor()
    clip = {"type": "video", "video": (moving(31, 56, 56), 10.0), **options}
    if "fps" in options:
        clip["video"] = file_of(moving(31, 56, 56), 10.0)
    (prompt,) = as_prompts([asked(clip)])
    found = frame_indices(prompt.videos[0], processor)
    assert prompt.content == ASKED and prompt.videos[0].sampling.asked == options
    told: dict[str, Any] = {"videos": [moving(31, 56, 56)], "return_metadata": True}
    told["video_metadata"] = [{"total_num_frames": 31, "fps": 10.0}]
    if options == {"max_frames": 4} and not samples:
        assert found.tolist() == [0, 7, 15, 23]
    elif not options and not samples:
        assert found.tolist() == list(range(31))
    else:
        defaults = {"fps": None} if "num_frames" in options else {}
        theirs = processor(do_sample_frames=True, **told, **options, **defaults)["video_metadata"][0]
        assert found.tolist() == [int(i) for i in theirs.frames_indices]
    one = EncodedVideo.from_any((moving(1, 56, 56), 1.0))
    assert frame_indices(one, processor).tolist() == [0]


def test_two_samplings_of_a_file_are_two_videos_and_one_that_gives_no_frames_is_refused() -> None:
    from transformers import Qwen2VLVideoProcessor

    less = EncodedVideo.from_any({"video": MP4, "nframes": 4})
    assert less.digest != VIDEO.digest and less.sampling.asked == {"num_frames": 4} and less.data == VIDEO.data
    assert EncodedVideo.from_any({"video": less}) == less != EncodedVideo.from_any({"video": less, "fps": 1})
    with pytest.raises(DataError, match=r"cannot be sampled by .*num_frames=8"):
        frame_indices(EncodedVideo.from_any({"video": MP4, "num_frames": 8}), Qwen2VLVideoProcessor())


def bomb(shape: tuple[int, ...] = (4000, 4000, 4000, 3), dtype: str = "|u1", name: str = "frames.npy") -> bytes:
    stream, fps = io.BytesIO(), io.BytesIO()
    np.save(fps, np.float64(2))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(name, header.getvalue())
        file.writestr("fps.npy", fps.getvalue())
    return stream.getvalue()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"", "no video: 0 bytes"),
        (b"not a video at all", "no video: 18 bytes, begins b'not a video"),
        (b"#EXTM3U\nfile:///etc/passwd\n", "no video"),
        (MP4[:200], "broken video: 200 bytes"),
        (bomb(), r"broken video.*its frames are \(4000, 4000, 4000, 3\)"),
        (bomb((2, 4, 4, 3), "<f4"), "its frames are .* float32"),
        (bomb(name="other.npy"), "holds no frames"),
        (bomb((2, 2, 8, 3)), "frames of 8 × 2 pixels"),
        (bomb((0, 8, 8, 3)), "has 0 frames"),
        (FRAMES, "frames with the rate None: give how many a second"),
        ([], "frames with the rate None"),
        ((FRAMES, float("nan")), "the rate nan"),
        ((FRAMES, {"duration": 1.0}), "the rate None"),
        ((FRAMES, {"fps": 25.0, "total_num_frames": 70}), "7 frames out of 70, as its metadata say"),
        ((FRAMES, 0), "the rate 0"),
        ((FRAMES, True), "the rate None|is a tuple"),
        ((FRAMES.astype(np.float32), 2.0), "float32: wanted .* uint8, and not empty"),
        ((FRAMES[:0], 2.0), "not empty"),
        (([FRAMES[0], FRAMES[0][:20]], 2.0), "frames of 2 sizes"),
        (7, "is a int: wanted a path"),
        ("http://127.0.0.1:1/a.mp4", "nothing remote is read unless asked"),
        ("/nowhere/a.mp4", "cannot be read: FileNotFoundError"),
        ({"video": MP4, "fps": 0}, "fps=0: wanted frames a second"),
        ({"video": MP4, "fps": float("nan")}, "fps=nan: wanted"),
        ({"video": MP4, "num_frames": 1}, "num_frames=1: wanted a number of frames, 2 at least"),
        ({"video": MP4, "max_frames": 2.5}, "max_frames=2.5: wanted"),
        ({"video": MP4, "fps": 1, "num_frames": 4}, "has fps and num_frames"),
    ],
)
def test_what_is_no_video_is_refused_by_the_prompts_number(value: Any, said: str) -> None:
    with pytest.raises(DataError, match=rf"(?s)prompt 1: .*video 0.*({said})"):
        as_prompts(["fine", {"prompt": ASKED, "videos": [value]}])


def test_videos_that_are_too_large_and_files_broken_behind_their_headers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = file_of(FRAMES, 5.0, "avi")
    broken = replace(EncodedVideo.from_any(cut), data=cut[: len(cut) // 2])
    with pytest.raises(DataError, match=r"is broken: [1-6] of its 7 frames can be decoded|cannot be decoded"):
        broken.pixels(range(7))
    monkeypatch.setattr(videos, "MOST_PIXELS", 64 * 48 * 2)
    assert VIDEO.pixels([0, 6]).shape[0] == 2
    with pytest.raises(DataError, match="pixels in 3 frames; at most 6,144 are decoded: give fewer frames by fps"):
        VIDEO.pixels([0, 3, 6])
    monkeypatch.setattr(video_files, "MOST_FRAMES", 6)
    with pytest.raises(DataError, match="has 7 frames; 1 to 6 are read"):
        EncodedVideo.from_any(MP4)
    monkeypatch.setattr(videos, "MOST_BYTES", 500)
    with pytest.raises(DataError, match="at most 500 are read"):
        EncodedVideo.from_any(MP4)


@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi"])
def test_no_broken_file_ends_the_process(kind: str) -> None:
    whole, dice, said = file_of(FRAMES, 5.0, kind), np.random.default_rng(3), set()
    for cut in range(40):
        broken = np.frombuffer(whole, np.uint8)[: len(whole) - 20 * cut].copy()
        broken[dice.integers(12, len(broken), 20)] = dice.integers(0, 256, 20)
        try:
            video = EncodedVideo.from_any(broken.tobytes())
            said.add(len(video.pixels(range(min(video.frames, 7)))))
        except DataError as error:
            said.add(type(error))
    assert DataError in said


def test_without_the_library_a_file_is_refused_and_frames_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(DataError, match="need OpenCV: pip install opencv-python-headless"):
        EncodedVideo.from_any(MP4)
    assert EncodedVideo.from_any((FRAMES, 2.0)).pixels([6]).shape == (1, 48, 64, 3)


def test_more_or_fewer_videos_than_places_and_sounds_beside_videos_are_refused() -> None:
    for row in ({"prompt": ASKED}, {"prompt": ASKED, "videos": [MP4, MP4]}):
        with pytest.raises(DataError, match="placeholders for videos"):
            as_prompts([row])
    sound = {"type": "audio", "audio": (np.zeros(800, np.float32), 8000)}
    with pytest.raises(DataError, match="videos and sounds, and no model here takes both"):
        as_prompts([[{"role": "user", "content": [{"type": "video", "video": MP4}, sound]}]])
    for row in (
        {"messages": asked({"type": "video", "video": MP4})},
        {"prompt": "a", "completion": "b", "videos": [MP4]},
    ):
        with pytest.raises(DataError, match="has a video, and texts are trained with images and sounds alone"):
            rb.data.demonstrations([row], rb.tiny.ensure())


def test_pictures_and_videos_stand_in_one_prompt_each_in_its_order(tmp_path: Path) -> None:
    picture = Image.fromarray(FRAMES[0])
    parts = [{"type": "image", "image": picture}, {"type": "video", "video": MP4}, {"type": "image", "image": picture}]
    (prompt,) = as_prompts([[{"role": "user", "content": parts}]])
    assert prompt.content[0]["content"] == [{"type": "image"}, PLACE, {"type": "image"}]
    assert len(prompt.images) == 2 and prompt.media == (*prompt.images, *prompt.videos)


def test_files_joins_and_batches_keep_videos_and_how_they_are_sampled(tmp_path: Path) -> None:
    other = EncodedVideo.from_any({"video": MP4, "fps": 2, "max_frames": 6})
    held = ((VIDEO,), (other, EncodedVideo.from_any((FRAMES, 2.5))), ())
    made = rollouts()
    contents = (ASKED, [{"role": "user", "content": [PLACE] * 2}], "what?")
    prompts = zip(made.prompts, contents, held, strict=True)
    made = replace(made, prompts=tuple(replace(p, content=c, videos=v) for p, c, v in prompts)).score(range(6))
    assert [rollout.videos for rollout in made.flat] == [own for own in held for _ in range(2)]
    again = Rollouts.from_parquet(made.to_parquet(tmp_path / "r.parquet"))
    assert again.prompts == made.prompts and again.prompts[1].videos[0].sampling.asked == {"fps": 2, "max_frames": 6}
    batch = made.batch(lambda rewards, group: rewards)
    assert batch.videos == tuple(own for own in held for _ in range(2)) and batch.media == ("videos",)
    read = TrainBatch.from_parquet(batch.to_parquet(tmp_path / "b.parquet"))
    assert read.videos == batch.videos and read.key == batch.key != batch.replace(videos=None).key
    assert batch.rows([3, 0]).media_rows() == [held[1], held[0]] and batch.rows([4]).media == ()
    joined = rb.data.join(batch, batch.replace(videos=None))
    assert joined.videos == (*batch.videos, *[()] * 6)
    assert pickle.loads(pickle.dumps(batch)).videos == batch.videos
    set_of = rb.data.PromptSet.of(made.prompts)
    less = replace(made.prompts[0], videos=(EncodedVideo.from_any({"video": MP4, "num_frames": 4}),))
    assert set_of.fingerprint != rb.data.PromptSet.of([less, *made.prompts[1:]]).fingerprint
    with pytest.raises(DataError, match="videos of 1 sequences for 6"):
        batch.replace(videos=((VIDEO,),))
    with pytest.raises(DataError, match="4 completions are of prompts with videos, and the judge watches none"):
        refuse_videos(list(made.flat), "the judge")
    with pytest.raises(DataError, match="the sequences have videos, and reward models watch none"):
        up_to_the_end(batch)
    told = rb.data.load([made.prompts[0], {"prompt": "x", "label": None}])
    assert told[0].videos == made.prompts[0].videos
