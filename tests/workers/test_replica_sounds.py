"""A vLLM replica of an audio-language model: what it draws behind sounds, by transformers' own numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rlbench.data import EncodedSound, Prompt
from rlbench.data.runs.journal import read
from rlbench.data.runs.traces import Traces
from rlbench.envs import Step
from rlbench.errors import DataError
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.serving.options import ServeOptions
from rlbench.workers.replica.vllm import VllmReplica
from tests.hearing import RATE, features, save_ears, sounds, tokens_of
from tests.workers.ending import end_here

from .media_jobs import drawn_as_expected, job
from .seeing import Asks, Shows
from .turns import Rows
from .turns import job as turns_job

pytestmark = pytest.mark.engine

Lane = Callable[..., Any]
PLACE = {"type": "audio"}
ASKED = [{"role": "user", "content": [PLACE, {"type": "text", "text": "what?"}]}]


@pytest.fixture(scope="module")
def lane() -> Iterator[Lane]:
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute") as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_ears(tmp_path_factory.mktemp("hears"))


@pytest.fixture(scope="module")
def replica(folder: str, lane: Lane) -> Iterator[VllmReplica]:
    limit = {"limit_mm_per_prompt": {"audio": 2}}
    made = VllmReplica(ReplicaConfig(folder, dtype="float32", kv_cache_bytes=64 << 20, engine_kwargs=limit))
    lane(made.build)
    yield made
    lane(end_here, made)


@pytest.fixture(scope="module")
def reference(folder: str) -> tuple[Any, Any]:
    """The model and processor of transformers, which share nothing with vLLM's."""
    from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoProcessor.from_pretrained(folder)


def expected(reference: tuple[Any, Any], prompt: Prompt, response: list[int]) -> tuple[list[int], np.ndarray]:
    """The prompt's token ids by the family's processor and the response's log-probs by transformers."""
    model, processor = reference
    text = processor.apply_chat_template(prompt.content, add_generation_prompt=True, tokenize=False)
    waves = [sound.samples(RATE) for sound in prompt.sounds]
    given = {"audio": waves, "sampling_rate": RATE} if waves else {}
    inputs = processor(text=[text], return_tensors="pt", **given)
    ids = inputs.pop("input_ids")
    inputs.pop("attention_mask")
    whole = torch.cat([ids, torch.tensor([response], dtype=ids.dtype)], 1)
    with torch.no_grad():
        logprobs = model(input_ids=whole, **inputs).logits.log_softmax(-1)[0]
    drawn = logprobs[ids.shape[1] - 1 : -1].gather(1, whole[0, ids.shape[1] :, None])
    return ids[0].tolist(), drawn[:, 0].numpy()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """A sound, one of another rate and two channels, a text, and a chat of two sounds."""
    one, two, three = sounds(3)
    other = EncodedSound.from_any((np.stack([sounds(2, 44_100)[1].samples(44_100)] * 2, 1), 44_100))
    both = [{"role": "user", "content": [PLACE, {"type": "text", "text": "or"}, PLACE]}]
    hello = Prompt([{"role": "user", "content": "hello"}])
    return [Prompt(ASKED, sounds=(one,)), Prompt(ASKED, sounds=(other,)), hello, Prompt(both, sounds=(two, three))]


def test_log_probs_and_token_ids_are_those_of_transformers_in_a_mixed_batch(replica, lane, reference, prompts):
    arrays = drawn_as_expected(replica, lane, prompts, partial(expected, reference), within=1e-5)
    assert arrays.prompt_token_ids[0].count(263) == tokens_of(prompts[0].sounds[0]) > 5


def test_given_tokens_are_scored_with_their_sounds_and_a_begun_answer_is_continued(replica, lane, prompts):
    arrays = lane(replica.generate, job(prompts[:3], n=1, temperature=1.0, max_tokens=3, ignore_eos=True))
    rows = Rows(arrays)
    wholes = [arrays.prompt_token_ids[p] + rows.of("token_ids", (p, 0)) for p in range(3)]
    scored = lane(replica.prompt_logprobs, list(wholes), tuple(p.sounds for p in prompts[:3]))
    for p, row in enumerate(scored):
        assert row[-3:].tolist() == pytest.approx(rows.of("logprobs", (p, 0)), abs=1e-5)
    quiet = EncodedSound.from_any((np.zeros(prompts[0].sounds[0].frames, np.float32), RATE))
    (other,) = lane(replica.prompt_logprobs, [wholes[0]], ((quiet,),))
    assert np.abs(other - scored[0]).max() > 1e-3  # of another sound
    begun = Prompt(wholes[0], sounds=prompts[0].sounds)
    went_on = lane(replica.generate, job([begun], n=1, temperature=0, max_tokens=2))
    assert went_on.prompt_token_ids[0] == wholes[0] and len(went_on.token_ids)


@pytest.mark.parametrize("broken", range(7))
def test_what_cannot_be_served_names_the_prompt_and_leaves_the_replica_usable(replica, lane, prompts, broken):
    (sound,) = prompts[0].sounds
    nothing = EncodedSound.from_any((np.zeros(100, np.float32), RATE))
    cut = replace(sound, data=sound.data[:30], digest="cut")
    picture = Prompt([{"role": "user", "content": [{"type": "image", "image": np.zeros((56, 56, 3), np.uint8)}]}])
    bad, token = [
        (Prompt([{"role": "user", "content": [PLACE] * 3}], sounds=(sound,) * 3), "takes 2 here.*limit_mm_per_prompt"),
        (Prompt("no place", sounds=(sound,)), "0 places for its 1 sounds"),
        (Prompt(ASKED, sounds=((np.zeros(31 * RATE, np.float32), RATE),)), "longer than the 30 s"),
        (Prompt(ASKED, sounds=(nothing,)), "too short"),
        (Prompt(ASKED, sounds=(cut,)), "cannot be decoded"),
        (Prompt("<|AUDIO|>?"), "the model's token for a sound, and has none"),
        (picture, "takes text and sounds: leave the images out"),
    ][broken]
    with pytest.raises(DataError, match=rf"(?s)prompt 1\b.*{token}"):
        lane(replica.generate, job([prompts[0], bad, prompts[1]]))
    assert len(lane(replica.generate, job(prompts[:2], n=1, max_tokens=1)).texts) == 2
    assert replica.status()["running"] == 0


@pytest.mark.parametrize("first", [None, "listen well"])
def test_turns_go_on_behind_the_sound(replica, lane, reference, prompts, first):
    asked = job(prompts[:1] + prompts[2:], n=2, temperature=1.0)
    env = turns_job([], env=lambda: Asks(first), max_turns=2).env
    rows = Rows(lane(replica.generate, replace(asked, env=env, asked=(prompts[0], *prompts[2:]))))
    for key in rows.keys:
        prompt = prompts[(0, 2, 3)[key[0]]]
        whole = rows.arrays.prompt_token_ids[key[0]] + rows.of("token_ids", key)
        chat = [*prompt.content, *([{"role": "user", "content": first}] if first else [])]
        plain, _ = expected(reference, Prompt(chat, sounds=prompt.sounds), [])
        assert whole[: len(plain)] == plain
        _, logprobs = expected(reference, Prompt(chat, sounds=prompt.sounds), whole[len(plain) :])
        mask = np.array(rows.of("mask", key))[-len(logprobs) :]
        sampled = np.array(rows.of("logprobs", key))[-len(logprobs) :]
        assert np.abs(logprobs - sampled)[mask].max() < 1e-5
        assert set(rows.of("turns", key)) == {0, 1} and not rows.info(key).get("errors")


def test_an_environment_that_shows_a_sound_or_an_image_ends_its_sample_alone(replica, lane, prompts):
    heard = [{"type": "audio", "audio": prompts[0].sounds[0].data}]
    seen = [{"type": "image", "image": np.zeros((56, 56, 3), np.uint8)}]
    for observation, said in ((heard, "environments show texts and images alone"), (seen, "takes text and sounds")):

        class Once(Shows):
            def step(self, turn, observation=observation):
                return Step(observation if turn.prompt.sounds else "more", done=turn.number == 1)

        env = turns_job([], env=lambda kind=Once: kind(None), max_turns=3).env
        asked = [prompts[0], prompts[2]]
        rows = Rows(lane(replica.generate, replace(job(asked, n=1, max_tokens=2), env=env, asked=tuple(asked))))
        (error,) = rows.info((0, 0))["errors"]
        assert said in error["message"] and rows.finish((0, 0)) == "abort" and not rows.info((1, 0)).get("errors")


def test_the_features_of_both_libraries_are_the_same(replica, lane, reference, prompts):
    """The replica's own tower and ours get one spectrogram, whatever rate a sound came at."""
    from rlbench.workers.replica.media import processed

    sound = prompts[1].sounds[0]
    made = lane(processed, replica.built, [262, 263, 264], [sound])
    (item,) = made["mm_kwargs"]["audio"]
    ours = features(reference[1].feature_extractor, [EncodedSound.from_any((sound.samples(RATE), RATE))])
    assert torch.equal(item["input_features"].data, ours["input_features"][0])


# -- behind a URL


def given(*heard: EncodedSound, text: str = "what?") -> list[dict[str, Any]]:
    """A message as OpenAI's clients send it, with what they may say besides."""
    parts = [
        {"type": "input_audio", "input_audio": {"data": one.data_url.split(",")[1], "format": "wav"}, "uuid": "mine"}
        for one in heard
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def post(replica: VllmReplica, lane: Lane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Asks the replica's endpoint; `.journal` is its file."""
    journal = tmp_path_factory.mktemp("endpoint") / "0.jsonl"
    port = lane(replica.serve, ServeOptions(str(journal), {"policy": None}, "key"))
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers={"Authorization": "Bearer key"})

    def asking(messages: Any, run: str = "a", **body: Any) -> httpx.Response:
        asked = {"model": "policy", "messages": messages, "max_tokens": 4, "temperature": 0, **body}
        return client.post("/v1/chat/completions", json=asked, headers={"X-Rlbench-Run": run})

    asking.journal = journal  # type: ignore[attr-defined]
    yield asking
    lane(replica.unserve)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_clients_give_sounds_and_traces_keep_them(post: Any, reference: tuple[Any, Any]) -> None:
    one, other = sounds(2)
    fast = EncodedSound.from_any((other.samples(44_100), 44_100))
    said(post(given(one)))
    assert said(post(given(fast), run="b")) == said(post(given(fast, text="what?"), run="c"))
    said(post([{"role": "user", "content": "what?"}], run="d"))
    calls = list(read(post.journal))
    assert len(calls) == 4 and calls[1].prompt == calls[2].prompt != calls[0].prompt
    rollouts = Traces.of(calls, lambda ids: "", "", None).rollouts
    heard = [prompt.sounds for prompt in rollouts.prompts]
    assert sorted(len(own) for own in heard) == [0, 1, 1] and rollouts.samples == 4
    for number, response in enumerate(rollouts.responses):
        prompt = rollouts.prompts[rollouts.group[number]]
        ids, logprobs = expected(reference, prompt, response.tolist())
        assert ids == rollouts.prompt_ids[rollouts.group[number]].tolist()
        sampled, mask = (
            rollouts.responses.with_values(column)[number] for column in (rollouts.logprobs, rollouts.mask)
        )
        assert np.abs(logprobs - sampled)[mask].max() < 1e-4, "the endpoint heard what transformers hears"
    assert [own[0].rate for own in heard if own] == [RATE, RATE]


def test_what_clients_may_not_give_is_refused_and_later_sounds_are_not_trained_on(post: Any, tmp_path: Path) -> None:
    one, other = sounds(2)
    (tmp_path / "x.wav").write_bytes(one.data)
    long = EncodedSound.from_any((np.zeros(31 * RATE, np.int16), RATE))
    for token, part in (
        ("its part holds none", {"type": "input_audio", "input_audio": {"path": str(tmp_path / "x.wav")}}),
        ("no base64", {"type": "input_audio", "input_audio": {"data": "!!!", "format": "wav"}}),
        ("sound 0", {"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}}),
        ("takes text and sounds", {"type": "audio_url", "audio_url": {"url": (tmp_path / "x.wav").as_uri()}}),
        ("takes text and sounds", {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}),
        ("token for a sound", {"type": "text", "text": "<|AUDIO|>"}),
        ("longer than the 30 s", given(long)[0]["content"][0]),
    ):
        answer = post([{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}])
        assert answer.status_code == 400 and token in answer.text, (token, answer.text)
    assert "the model takes 2" in post(given(one, one, one)).text
    assert "media_io_kwargs" in post(given(one), media_io_kwargs={"audio": {}}).text
    begin = sum(1 for _ in read(post.journal))
    plain = {"run": "late", "logit_bias": {"65": 100}}  # an answer that a client gives back as it was
    asked = given(one)
    for more in ([{"role": "user", "content": "sure?"}], given(other), []):
        asked += [{"role": "assistant", "content": said(post(asked, **plain))}, *more]
    calls = list(read(post.journal))[begin:]
    assert [call.parent for call in calls] == [None, *((call.number, 0) for call in calls[:2])]
    rollouts = Traces.of(calls[:2], lambda ids: "", "", None).rollouts
    assert [len(prompt.sounds) for prompt in rollouts.prompts] == [1] and rollouts.samples == 1
    assert rollouts.prompt_ids[0].tolist() == calls[0].prompt
    with pytest.raises(DataError, match=r"run 'late' was given a sound after its first call.*traces\.select"):
        _ = Traces.of(calls, lambda ids: "", "", None).rollouts
