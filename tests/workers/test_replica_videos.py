"""A vLLM replica of a model that watches: what it draws behind videos, by transformers' own numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rlbench.data import EncodedVideo, Prompt
from rlbench.data.prompts.images import EncodedImage
from rlbench.errors import DataError
from rlbench.tiny.vision_model import build_model, build_processor
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.vllm import VllmReplica
from tests.watching import ASKED, PLACE, file_of, moving, video
from tests.workers.ending import end_here

from .media_jobs import drawn_as_expected, job
from .seeing import Asks, Shows, expected
from .turns import Rows
from .turns import job as turns_job

pytestmark = pytest.mark.engine

Lane = Callable[..., Any]
IMAGE = {"type": "image"}
PICTURE = EncodedImage.from_any(moving(1, 84, 56, seed=5)[0])


@pytest.fixture(scope="module")
def lane() -> Iterator[Lane]:
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute") as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model and its processor, as transformers read them; weights so wide that videos tell."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder, processor = tmp_path_factory.mktemp("watches"), build_processor()
    model = build_model(processor, seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2 if weight.ndim > 1 else 1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    made = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return made, AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def replica(reference: tuple[Any, Any], lane: Lane) -> Iterator[VllmReplica]:
    limit = {"limit_mm_per_prompt": {"image": 2, "video": 2}}
    folder = reference[0].name_or_path
    made = VllmReplica(ReplicaConfig(folder, dtype="float32", kv_cache_bytes=64 << 20, engine_kwargs=limit))
    lane(made.build)
    yield made
    lane(end_here, made)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """A video of an odd number of frames, a file, a text, a picture between two videos, and a text with its place."""
    one, two = video(5, 3.0), video(4, 25.0, seed=2, width=84)
    file = EncodedVideo.from_any(file_of(moving(6, seed=3), 10.0))
    mixed = [{"role": "user", "content": [PLACE, {"type": "text", "text": "or"}, IMAGE, PLACE]}]
    return [
        Prompt(ASKED, videos=(one,)),
        Prompt(ASKED, videos=(file,)),
        Prompt([{"role": "user", "content": "hello"}]),
        Prompt(mixed, videos=(two, one), images=(PICTURE,)),
        Prompt("<|vision_start|><|video_pad|><|vision_end|>what?", videos=(two,)),
    ]


@pytest.fixture(scope="module")
def too_long() -> Prompt:
    """A video of more tokens than the model takes, which is a second's work."""
    return Prompt(ASKED, videos=(video(280, width=224, height=224, seed=9),))


def test_log_probs_and_token_ids_are_those_of_transformers_in_a_mixed_batch(replica, lane, reference, prompts):
    arrays = drawn_as_expected(replica, lane, prompts, partial(expected, reference), within=1e-5)
    token = reference[1].video_token_id
    assert [arrays.prompt_token_ids[p].count(token) for p in range(5)] == [12, 12, 0, 12 + 12, 12]


def test_given_tokens_are_scored_with_their_videos_by_order_and_rate(replica, lane, prompts):
    arrays = lane(replica.generate, job(prompts, n=1, temperature=1.0, max_tokens=3, ignore_eos=True))
    rows = Rows(arrays)
    wholes = [arrays.prompt_token_ids[p] + rows.of("token_ids", (p, 0)) for p in range(5)]
    scored = lane(replica.prompt_logprobs, list(wholes), tuple(p.media for p in prompts))
    for p, row in enumerate(scored):
        assert row[-3:].tolist() == pytest.approx(rows.of("logprobs", (p, 0)), abs=1e-5)
    (shown,) = prompts[0].videos
    backwards = EncodedVideo.from_any((shown.pixels(range(5))[::-1], 3.0))
    slower = EncodedVideo.from_any((shown.pixels(range(5)), 0.5))
    for other in (backwards, slower):
        (changed,) = lane(replica.prompt_logprobs, [list(wholes[0])], ((other,),))
        assert np.abs(changed - scored[0]).max() > 1e-3
    begun = Prompt(wholes[3], videos=prompts[3].videos, images=prompts[3].images)
    went_on = lane(replica.generate, job([begun], n=1, temperature=0, max_tokens=2))
    assert went_on.prompt_token_ids[0] == wholes[3] and len(went_on.token_ids)


@pytest.mark.parametrize("broken", range(6))
def test_what_cannot_be_served_names_the_prompt_and_leaves_the_replica_usable(replica, lane, prompts, too_long, broken):
    shown = prompts[0].videos[0]
    cut = replace(shown, data=shown.data[: len(shown.data) // 2], digest="cut")
    bad, token = [
        (Prompt([{"role": "user", "content": [PLACE] * 3}], videos=(shown,) * 3), "3 videos.*takes 2 here.*'video': …"),
        (Prompt("no place", videos=(shown,)), "0 places for its 1 videos"),
        (Prompt(ASKED, videos=(cut,)), "cannot be decoded"),
        (Prompt("<|video_pad|>?"), "the model's token for a video, and has none"),
        (too_long, "tokens with its videos, and there is room for 2047"),
        (Prompt([{"role": "user", "content": [IMAGE, PLACE]}], images=(PICTURE,), videos=(shown,) * 1), ""),
    ][broken]
    if not token:  # tokens of another video than the one given
        ids = list(lane(replica.generate, job([bad], n=1, max_tokens=1)).prompt_token_ids[0])
        bad, token = Prompt(ids, images=bad.images, videos=(video(9),)), "places for images and videos of other sizes"
    with pytest.raises(DataError, match=rf"(?s)prompt 1\b.*{token}"):
        lane(replica.generate, job([prompts[0], bad, prompts[1]]))
    assert len(lane(replica.generate, job(prompts[:2], n=1, max_tokens=1)).texts) == 2
    assert replica.status()["running"] == 0


@pytest.mark.parametrize("first", [None, "watch well"])
def test_turns_go_on_behind_videos_and_pictures_are_shown_there(replica, lane, reference, prompts, first):
    asked = [prompts[0], prompts[3]]
    shown = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "and?"}]
    for env in (lambda: Asks(first), lambda: Asks(first, shown)):
        made = turns_job([], env=env, max_turns=2).env
        rows = Rows(lane(replica.generate, replace(job(asked, temperature=1.0), env=made, asked=tuple(asked))))
        for key in rows.keys:
            prompt = asked[key[0]]
            errors = rows.info(key).get("errors") or []
            assert not errors, errors
            whole = rows.arrays.prompt_token_ids[key[0]] + rows.of("token_ids", key)
            chat = [*prompt.content, *([{"role": "user", "content": first}] if first else [])]
            plain, _ = expected(reference, replace(prompt, content=chat), [])
            assert whole[: len(plain)] == plain
            if not rows.arrays.observed_images or not rows.arrays.observed_images[rows.keys.index(key)]:
                _, logprobs = expected(reference, replace(prompt, content=chat), whole[len(plain) :])
                mask = np.array(rows.of("mask", key))[-len(logprobs) :]
                sampled = np.array(rows.of("logprobs", key))[-len(logprobs) :]
                assert np.abs(logprobs - sampled)[mask].max() < 1e-5
    assert rows.arrays.observed_images and all(rows.arrays.observed_images[2:])


def test_an_environment_that_shows_a_video_ends_its_sample_alone(replica, lane, prompts):
    seen = [{"type": "video", "video": prompts[0].videos[0]}]
    env = turns_job([], env=lambda: Shows(None, seen, None), max_turns=3).env
    rows = Rows(lane(replica.generate, replace(job(prompts[2:3], n=1, max_tokens=2), env=env, asked=(prompts[2],))))
    (error,) = rows.info((0, 0))["errors"]
    assert "has a video, and environments show texts and images alone" in error["message"]
