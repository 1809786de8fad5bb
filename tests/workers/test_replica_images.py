"""A vLLM replica of a vision-language model: what it draws behind pictures, by transformers' own numbers."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import httpx
import numpy as np
import pytest
import torch

from rlbench import tiny
from rlbench.data import EncodedImage, Prompt, as_prompts
from rlbench.data.runs.journal import read
from rlbench.data.runs.traces import Traces
from rlbench.envs import Step
from rlbench.errors import DataError
from rlbench.tiny.vision_model import build_model, build_processor
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.serving.options import ServeOptions
from rlbench.workers.replica.vllm import VllmReplica
from tests.workers.ending import end_here

from .media_jobs import drawn_as_expected, job
from .seeing import PLACE, PLACE_TOKEN, Asks, Shows, expected, logprobs_at, remote
from .turns import Rows
from .turns import job as turns_job

pytestmark = pytest.mark.engine

Lane = Callable[..., Any]
WIDER = 4
PICTURE = {"type": "image", "image": np.full((56, 56, 3), 99, np.uint8)}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def lane() -> Iterator[Lane]:
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute") as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that sees before its warm-up, which takes a minute; weights so wide that pictures tell."""
    processor = build_processor()
    model = build_model(processor, seed=0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(WIDER if weight.ndim > 1 else 1)
        words = model.get_input_embeddings().weight
        words[:33], words[127:] = 0, 0  # the likeliest tokens are printable: what clients get encodes to the same
    folder = tmp_path_factory.mktemp("sees")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def replica(folder: Path, lane: Lane) -> Iterator[VllmReplica]:
    limit = {"limit_mm_per_prompt": {"image": 4}}
    config = ReplicaConfig(str(folder), dtype="float32", kv_cache_bytes=64 << 20, max_num_seqs=8, engine_kwargs=limit)
    made = VllmReplica(config)
    lane(made.build)
    yield made
    lane(end_here, made)


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[Any, Any]:
    """The model and processor of transformers, which share nothing with vLLM's."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Two pictures, a text, a chat of two pictures, and a text with the model's own places."""
    one, two, three = as_prompts(tiny.vision_prompts(3, seed=1))
    both = [{"role": "user", "content": [PLACE, {"type": "text", "text": "or"}, PLACE]}]
    written = Prompt("<|vision_start|><|image_pad|><|vision_end|>colours?", images=three.images)
    return [one, two, Prompt(HELLO), Prompt(both, images=(one.images[0], larger(three))), written]


def larger(prompt: Prompt) -> EncodedImage:
    return EncodedImage.from_any(prompt.images[0].pil().resize((112, 84)))


def test_log_probs_and_token_ids_are_those_of_transformers_in_a_mixed_batch(replica, lane, reference, prompts):
    arrays = drawn_as_expected(replica, lane, prompts, partial(expected, reference), within=1e-4)
    assert len(arrays.prompt_token_ids[0]) == len(arrays.prompt_token_ids[1]) > 10


def test_given_tokens_are_scored_with_their_images_and_a_begun_answer_is_continued(replica, lane, prompts):
    arrays = lane(replica.generate, job(prompts[:3], n=1, temperature=1.0, max_tokens=3))
    rows = Rows(arrays)
    wholes = [arrays.prompt_token_ids[p] + rows.of("token_ids", (p, 0)) for p in range(3)]
    scored = lane(replica.prompt_logprobs, list(wholes), tuple(p.images for p in prompts[:3]))
    for p, row in enumerate(scored):
        assert row[-3:].tolist()[: len(rows.of("logprobs", (p, 0)))] == pytest.approx(
            rows.of("logprobs", (p, 0)), abs=1e-4
        )
    (other,) = lane(replica.prompt_logprobs, [wholes[0]], (prompts[1].images,))
    assert np.abs(other - scored[0]).max() > 0.1  # of another picture
    begun = Prompt(wholes[0], images=prompts[0].images)
    went_on = lane(replica.generate, job([begun], n=1, temperature=0, max_tokens=2))
    assert went_on.prompt_token_ids[0] == wholes[0] and len(went_on.token_ids)


@pytest.mark.parametrize("broken", range(7))
def test_what_cannot_be_served_names_the_prompt_and_leaves_the_replica_usable(replica, lane, prompts, broken):
    image = EncodedImage.from_any(np.full((56, 56, 3), 40 * broken, np.uint8))  # that was not seen before
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3), np.uint8)
    jpeg = io.BytesIO()
    EncodedImage.from_any(noise).pil().save(jpeg, "JPEG")
    places = [PLACE] * 5
    bad, token = [
        (Prompt([{"role": "user", "content": places}], images=(image,) * 5), "takes 4 here.*limit_mm_per_prompt"),
        (Prompt("no place", images=(image,)), "0 places for its 1 images"),
        (Prompt([{"role": "user", "content": [PLACE]}], images=(np.zeros((2, 900, 3), np.uint8),)), "aspect ratio"),
        (Prompt([{"role": "user", "content": [PLACE]}], images=(jpeg.getvalue()[:-9000],)), "cannot be decoded"),
        (Prompt("a" * 2044 + "<|image_pad|>", images=(image,)), "room for 2047"),
        (Prompt("<|image_pad|>?"), "has none"),
        (Prompt([259, 262, *[264] * 9, 263, 257], images=(image,)), "images of other sizes"),
    ][broken]
    with pytest.raises(DataError, match=rf"(?s)prompt 1\b.*{token}"):
        lane(replica.generate, job([prompts[0], bad, prompts[1]]))
    fresh = Prompt([{"role": "user", "content": [PLACE]}], images=(image,))
    assert len(lane(replica.generate, job([prompts[0], fresh], n=1, max_tokens=1)).texts) == 2
    assert replica.status()["running"] == 0


@pytest.mark.parametrize("first", [None, "look well"])
def test_turns_go_on_behind_the_picture(replica, lane, reference, prompts, first):
    asked = job(prompts[:1] + prompts[2:4], n=2, temperature=1.0)
    env = turns_job([], env=lambda: Asks(first), max_turns=2).env
    rows = Rows(lane(replica.generate, replace(asked, env=env, asked=(prompts[0], *prompts[2:4]))))
    for key in rows.keys:
        prompt = prompts[(0, 2, 3)[key[0]]]
        whole = rows.arrays.prompt_token_ids[key[0]] + rows.of("token_ids", key)
        chat = [*prompt.content, *([{"role": "user", "content": first}] if first else [])]
        plain, _ = expected(reference, Prompt(chat, images=prompt.images), [])
        assert whole[: len(plain)] == plain
        _, logprobs = expected(reference, Prompt(chat, images=prompt.images), whole[len(plain) :])
        mask = np.array(rows.of("mask", key))[-len(logprobs) :]
        sampled = np.array(rows.of("logprobs", key))[-len(logprobs) :]
        assert np.abs(logprobs - sampled)[mask].max() < 1e-4
        assert set(rows.of("turns", key)) == {0, 1} and not rows.info(key).get("errors")


def shown(replica: VllmReplica, lane: Lane, prompts: list[Prompt], *observations: Any, n: int = 2) -> Rows:
    """What is drawn where an environment shows this."""
    env = turns_job([], env=lambda: Shows(*observations), max_turns=9).env
    asked = job(prompts, n=n, temperature=1.0, max_tokens=3, ignore_eos=True)
    return Rows(lane(replica.generate, replace(asked, env=env, asked=tuple(prompts))))


def test_images_that_an_environment_shows_are_seen_where_they_stand(replica, lane, reference, prompts):
    one, two = prompts[1].images[0], larger(prompts[0])
    asked = [prompts[0], prompts[2], prompts[3]]  # with one image, none, and two
    message = [{"role": "user", "content": [{"type": "image", "image": two.data}, {"type": "text", "text": "look"}]}]
    parts = [{"type": "text", "text": "now"}, {"type": "image_url", "image_url": {"url": one.data_url}}]
    stray = [65, PLACE_TOKEN, PLACE_TOKEN, 66]  # no image, and what a policy might sample: tokens as others
    for observations in ([None, "and?", parts, "sure?", None], [message, stray, parts, None]):
        rows = shown(replica, lane, asked, *observations)
        seen = [image for image, told in ((two, message), (one, parts)) if told in observations]
        for key in rows.keys:
            assert not rows.info(key).get("errors") and rows.finish(key) == "length"
            shared = rows.arrays.prompt_token_ids[key[0]]
            observed = rows.arrays.observed_images[rows.keys.index(key)]
            assert [image.digest for image in observed] == [image.digest for image in seen]
            whole, mask = shared + rows.of("token_ids", key), np.array(rows.of("mask", key))
            starts = [i for i, t in enumerate(shared) if t == PLACE_TOKEN and shared[i - 1] != PLACE_TOKEN]
            own = list(zip(asked[key[0]].images, starts, strict=True))
            places = [(image, image.at + len(shared)) for image in observed]
            scored = logprobs_at(reference, whole, own + places)[len(shared) - 1 :]
            assert np.abs(scored - rows.of("logprobs", key))[mask].max() < 1e-4
            assert not any(mask[image.at] for image in observed) and mask.sum() == 3 * (len(observations) - 1)
            told = [m for m in rows.info(key)["messages"] if isinstance(m["content"], list)]
            assert [PLACE in m["content"] for m in told] == [True] * len(seen)


def test_what_each_sample_is_shown_first_is_its_own(replica, lane, prompts):
    class Own(Shows):
        def reset(self, prompt):
            first = bytes(prompts[next(count) % 2].images[0].data)
            return [{"role": "user", "content": [{"type": "image", "image": first}]}]

    count = iter(range(9))
    env = replace(turns_job([], max_turns=1, env=object).env, blob=cloudpickle.dumps(lambda: Own(None, None)))
    assert env.max_turns == 1
    asked = job(prompts[2:3], n=2, max_tokens=2)
    rows = Rows(lane(replica.generate, replace(asked, env=env, asked=(prompts[2],))))
    assert [[image.at for image in own] for own in rows.arrays.observed_images] == [[0], [0]]
    assert PLACE_TOKEN not in rows.arrays.prompt_token_ids[0]
    assert len({own[0].digest for own in rows.arrays.observed_images}) == 2


@pytest.mark.parametrize(
    ("content", "observation", "token"),
    [
        (
            None,
            [{"type": "image", "image": np.full((28, 28, 3), i, np.uint8)} for i in range(4)],
            "5 images, but.*takes 4",
        ),
        (None, [{"type": "image", "image": b"no image"}], "broken or no image"),
        (None, [{"type": "image", "image": "http://127.0.0.1/a.png"}], "nothing remote is read"),
        (None, [{"type": "image"}], "1 placeholders for images and 0 images"),
        (None, [{"type": "image", "image": np.zeros((2, 900, 3), np.uint8)}], "aspect ratio"),
        (None, [PICTURE, {"type": "text", "text": "<|image_pad|>"}], "2 of the model's tokens for an image.*1 images"),
        ("a text", [PICTURE], "the prompt is no chat"),
        (None, [PICTURE, "text"], "wanted a text, messages"),
    ],
    ids=range(8),
)
def test_an_image_that_cannot_be_shown_ends_its_sample_alone(replica, lane, prompts, content, observation, token):
    asked = [prompts[0] if content is None else Prompt(content), prompts[1]]

    class Once(Shows):
        def reset(self, prompt):
            self.bad = prompt.images != prompts[1].images
            return None

        def step(self, turn):
            return Step(observation if self.bad else "more", done=turn.number == 1)

    env = turns_job([], env=lambda: Once(None), max_turns=3).env
    rows = Rows(lane(replica.generate, replace(job(asked, n=1, max_tokens=2), env=env, asked=tuple(asked))))
    (error,) = rows.info((0, 0))["errors"]
    assert re.search(token, error["message"], re.DOTALL) and error["where"] == "step", error["message"]
    assert rows.finish((0, 0)) == "abort" and not rows.info((1, 0)).get("errors")
    assert replica.status()["running"] == 0


def test_the_last_thing_shown_is_told_without_its_bytes(replica, lane, prompts):
    rows = shown(replica, lane, prompts[:1], None, [PICTURE, {"type": "text", "text": "over"}], n=1)
    assert rows.info()["last_observation"] == [PLACE, {"type": "text", "text": "over"}]
    assert rows.arrays.observed_images == [()]


def test_a_job_holds_an_image_once_for_all_its_prompts(prompts):
    noise = EncodedImage.from_any(np.random.default_rng(0).integers(0, 255, (128, 128, 3), np.uint8))
    asked = [Prompt([{"role": "user", "content": [PLACE]}], images=(noise,))] * 50
    assert len(pickle.dumps(replace(job(asked), asked=tuple(asked)))) < len(noise.data) + 30_000


# -- behind a URL


def pictured(*images: str, text: str = "colours?") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}, "uuid": "mine", "detail": "low"} for url in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def serve(replica, lane, tmp_path_factory) -> Iterator[Callable[..., Any]]:
    """Serves with these options; gives what posts to it."""
    journal = tmp_path_factory.mktemp("endpoint") / "0.jsonl"

    def serving(**options: Any) -> Callable[..., httpx.Response]:
        port = lane(replica.serve, ServeOptions(str(journal), {"policy": None}, "key", **options))
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers={"Authorization": "Bearer key"})

        def post(messages: Any, run: str = "a", path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
            asked = {"model": "policy", "messages": messages, "max_tokens": 4, **body}
            return client.post(path, json=asked, headers={"X-Rlbench-Run": run})

        post.journal = journal
        return post

    yield serving
    lane(replica.unserve)


def test_clients_show_pictures_and_traces_keep_them(serve, prompts, replica, lane):
    post = serve()
    url, other = (p.images[0].data_url for p in prompts[:2])
    answer = post(pictured(url), temperature=0).json()["choices"][0]["message"]["content"]
    drawn = lane(replica.generate, job(prompts[:1], n=1, temperature=0, max_tokens=4))
    assert answer == drawn.texts[0]
    assert post(pictured(other), temperature=0).json()["choices"][0]["message"]["content"] != answer
    said = [*pictured(url), {"role": "assistant", "content": f" {answer}\n"}, {"role": "user", "content": "sure?"}]
    assert post(said, temperature=0).status_code == 200
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    shown = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "colours?"}]}]
    assert post(shown, run="b", path="/v1/messages", temperature=0).json()["content"][0]["text"] == answer
    lane(replica.reload)  # which forgets what was processed
    assert post(pictured(url), run="c", temperature=0).json()["choices"][0]["message"]["content"] == answer
    calls = list(read(post.journal))[:4]
    first, second, third, fourth = calls
    assert first.prompt == drawn.prompt_token_ids[0] == fourth.prompt
    assert second.parent is None and third.parent == (first.number, 0)  # pictures of one size have the same tokens
    assert third.prompt[: third.ahead] == first.whole(0) and third.differs is not None
    traces = Traces.of(calls, lambda ids: "", "", None)
    rollouts = traces.rollouts
    assert sorted(p.images[0].digest for p in rollouts.prompts) == sorted(p.images[0].digest for p in prompts[:2])
    assert all(p.content[0]["content"][0] == PLACE for p in rollouts.prompts)


def test_a_run_that_is_shown_further_images_is_trained_on_with_them(serve, prompts, reference):
    post = serve()
    images = [prompts[0].images[0], prompts[1].images[0], larger(prompts[0])]
    one, two, wide = (pictured(image.data_url) for image in images)
    begin = sum(1 for _ in read(post.journal))

    def ask(run: str, *turns: list[dict[str, Any]]) -> None:
        said: list[dict[str, Any]] = []
        for messages in turns:
            said += messages
            answer = post(said, run=run, max_tokens=5, temperature=0).json()["choices"][0]["message"]
            said.append({"role": "assistant", "content": f"{answer['content']} "})  # a client that adds a space

    ask("alone", one, wide, [{"role": "user", "content": "sure?"}], pictured(images[1].data_url, images[0].data_url))
    ask("first", one, wide)
    ask("second", two)
    calls = list(read(post.journal))[begin:]
    assert [call.parent is None for call in calls] == [True, False, False, False, True, False, True]

    def rollouts_of(*names: str) -> Any:
        traces = Traces.of([call for call in calls if call.run in names], lambda ids: "", "", None)
        return replace(traces, runs=tuple(replace(run, group="g") for run in traces.runs)).rollouts

    alone, apart = rollouts_of("alone"), rollouts_of("first", "second")
    assert alone.prompts[0].images == (images[0],) and "base64" not in json.dumps(alone.infos)
    assert [i.digest for i in alone.observed_images[0]] == [images[i].digest for i in (2, 1, 0)]
    begins = alone.prompt_ids[0].tolist().index(PLACE_TOKEN)
    check_seen(alone, reference, [(images[0], begins)])
    assert apart.prompts[0].images == () and PLACE_TOKEN not in apart.prompt_ids[0]
    assert [[i.digest for i in own] for own in apart.observed_images] == [
        [images[0].digest, images[2].digest],
        [images[1].digest],
    ]
    check_seen(apart, reference, [])


def check_seen(rollouts: Any, reference: tuple[Any, Any], own: list[tuple[EncodedImage, int]]) -> None:
    """Hold sampled log-probs to those of transformers with the images at their places."""
    for i, response in enumerate(rollouts.responses):
        prompt = rollouts.prompt_ids[rollouts.group[i]].tolist()
        images = own + [(image, image.at + len(prompt)) for image in rollouts.observed_images[i]]
        scored = logprobs_at(reference, [*prompt, *response.tolist()], images)[len(prompt) - 1 :]
        sampled, mask = (rollouts.responses.with_values(column)[i] for column in (rollouts.logprobs, rollouts.mask))
        assert np.abs(scored - sampled)[mask].max() < 1e-4


def test_what_clients_may_not_show_is_refused_and_nothing_is_read(serve, prompts, tmp_path):
    post = serve()
    url = prompts[0].images[0].data_url
    (tmp_path / "x.png").write_bytes(prompts[0].images[0].data)
    refused = {
        "fetch_images": pictured("http://127.0.0.1:9/x.png"),
        "wanted a data URL": pictured((tmp_path / "x.png").as_uri()),
        "SVG": pictured("data:image/svg+xml;base64,PHN2Zz48L3N2Zz4="),
        "no base64": pictured("data:image/png;base64,!!!"),
        "the model takes 4": pictured(*[url] * 5),
        "takes text and images": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}],
        "token for an image": [{"role": "user", "content": "<|image_pad|>"}],
    }
    for token, messages in refused.items():
        answer = post(messages)
        assert answer.status_code == 400 and token in answer.text, (token, answer.text)
    assert "mm_processor_kwargs" in post(pictured(url), mm_processor_kwargs={"max_pixels": 10**9}).text
    assert post(pictured(url)).status_code == 200


def test_remote_pictures_are_read_when_the_endpoint_was_told_to(serve, prompts):
    post = serve(fetch_images=True)
    data = prompts[0].images[0].data
    with remote(data) as address:
        assert post(pictured(f"{address}/x.png"), run="far", temperature=0).status_code == 200
        assert post(pictured(f"{address}/x.svg")).status_code == 400
    (call,) = [call for call in read(post.journal) if call.run == "far"]
    (part, _) = call.request["messages"][0]["content"]
    assert part == {"type": "image_url", "image_url": {"url": prompts[0].images[0].data_url}}
