"""The inference side where there is no engine: what is asked, what is refused, and who counts and sleeps when."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlbench.data import Prompt
from rlbench.data.prompts.placing import IMAGE, VIDEO
from rlbench.dispatch import context
from rlbench.errors import DataError, EngineError, StateError
from rlbench.strategies import FakeStrategy, OptionError
from rlbench.strategies.generation import session_link
from rlbench.strategies.generation.engine import EngineStatus, own_prompts, sampling_of
from tests.watching import moving


class Told:
    """In the place of what talks to replicas: writes down what it is told."""

    def __init__(self, strategy: Any, config: Any, actor: Any) -> None:
        self.engine, self.said, self.fails = object(), [("made", config.engine_tp_size)], None

    def awake(self) -> bool:
        return self.said[-1] != ("sleep",)

    def wake(self) -> None:
        self.said.append(("wake",))

    def sleep(self) -> None:
        self.said.append(("sleep",))

    def generate(self, mine: Any, sampling: Any, samples: int, number: int) -> list[Any]:
        if self.fails is not None:
            raise self.fails
        self.said.append(("generate", [p.content for p in mine], sampling, samples, number))
        return [number]

    def update(self, actor: Any, transport: Any) -> dict[str, Any]:
        self.said.append(("update", actor, transport))
        return {}


class Session:
    """In the place of the session's end on its ranks."""

    replicas = Told

    @classmethod
    def here(cls) -> Any:
        return cls


@pytest.fixture
def on_a_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if in a call on a session's rank, with `Told` in the place of the replicas."""
    monkeypatch.setattr(session_link, "_home", f"{__name__}:Session")
    context.set_current(context.CallContext(worker="rlbench/demo/actor/0"))
    yield
    context.set_current(None)


def test_before_setup_every_call_names_setup() -> None:
    s = FakeStrategy()
    assert s.inference_engine is None
    for call in (
        lambda: s.gather_and_generate({}, all_prompts=["a"]),
        lambda: s.update_engine_weights(torch.nn.Linear(1, 1)),
        s.maybe_sleep_inference_engine,
        s.wakeup_inference_engine,
        lambda: s.inference_engine_status,
    ):
        with pytest.raises(StateError, match=r"call strategy\.setup_inference_engine\(args\) first"):
            call()


def test_a_process_that_is_on_no_sessions_ranks_is_told_where_to_go() -> None:
    with pytest.raises(EngineError, match=r"on no session's ranks.*train\.run\('train\.py'.*RLBENCH_SESSION=demo"):
        FakeStrategy().setup_inference_engine()


def test_ranks_that_cannot_share_engines_and_other_engines_are_refused(on_a_rank: Any) -> None:
    with pytest.raises(OptionError, match=r"world_size % engine_tp_size must be 0.*1 ranks.*engines of 3"):
        FakeStrategy().setup_inference_engine({"engine_tp_size": 3})
    with pytest.raises(OptionError, match="engine_type='hf'"):
        FakeStrategy().setup_inference_engine(engine_type="hf")


def test_setup_wakes_the_engine_and_brings_the_actors_weights(on_a_rank: Any) -> None:
    s, actor = FakeStrategy(), torch.nn.Linear(1, 1)
    assert s.setup_inference_engine(actor=actor) is s.inference_engine is not None
    assert s.generation.replicas.said == [("made", 1), ("wake",), ("update", actor, None)]
    assert s.inference_engine_status is EngineStatus.WAKEUP


def test_the_engine_sleeps_after_a_generation_unless_somebody_says_no(on_a_rank: Any) -> None:
    def slept(options: dict[str, Any], **call: Any) -> bool:
        s = FakeStrategy(args=options)
        s.setup_inference_engine()
        s.gather_and_generate({"n": 2}, all_prompts=["a"], **call)
        assert s.generation.replicas.said[2] == ("generate", ["a"], {}, 2, 1)
        return s.inference_engine_status is EngineStatus.SLEEPED

    assert slept({})
    assert not slept({}, sleep_engine=False)
    assert not slept({"enable_engine_sleep": False})


def test_the_options_of_setup_count_for_sleep(on_a_rank: Any) -> None:
    s = FakeStrategy()
    s.setup_inference_engine(Namespace(enable_engine_sleep=False, prompt_max_len=8))
    s.maybe_sleep_inference_engine()
    assert s.inference_engine_status is EngineStatus.WAKEUP


def test_a_generation_that_failed_does_not_count_so_that_its_seeds_come_again(on_a_rank: Any) -> None:
    s = FakeStrategy()
    s.setup_inference_engine()
    s.generation.replicas.fails = DataError("no")
    with pytest.raises(DataError):
        s.gather_and_generate({}, all_prompts=["a"])
    s.generation.replicas.fails = None
    assert s.gather_and_generate({}, all_prompts=["a"]) == [1]
    assert s.gather_and_generate({}, all_prompts=["a"]) == [2] and s.generate_calls == 2


def test_prompts_are_texts_chats_prompts_or_token_ids() -> None:
    chat = [{"role": "user", "content": "hi"}]
    asked = own_prompts(["a", chat, Prompt("b", label=3)], None, {})
    assert asked == [Prompt("a"), Prompt(chat), Prompt("b", label=3)]
    rows = [[1, 2], np.array([3]), torch.tensor([4, 5]), (np.int64(6),)]
    assert [p.content for p in own_prompts(None, rows, {})] == [[1, 2], [3], [4, 5], [6]]
    assert own_prompts([], None, {IMAGE: ([None], None)}) == own_prompts(None, [], {}) == []


@pytest.mark.parametrize(
    ("texts", "ids", "said"),
    [
        (None, None, "was given neither"),
        (["a"], [[1]], "was given both"),
        (["a", ""], None, "prompt 1 is an empty text"),
        (None, [[1], []], "prompt 1 of this rank"),
        (None, [[1.5]], "prompt 0 of this rank"),
        (None, ["sort 1"], "texts and chats go into all_prompts"),
        ([3.5], None, "prompt 0: wanted a text"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_place(texts: Any, ids: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        own_prompts(texts, ids, {})


def test_images_come_for_each_prompt_or_flat_with_their_numbers() -> None:
    red, blue = (np.full((2, 2, 3), shade, np.uint8) for shade in (9, 200))
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]}]
    asked = ["<pad>?", chat, "a"]
    for images in ([red, [red, blue], None], [[red], [red, blue], []]):
        prompts = own_prompts(asked, None, {IMAGE: (images, None)})
        assert [len(prompt.images) for prompt in prompts] == [1, 2, 0]
    flat = own_prompts(asked, None, {IMAGE: ([red, red, blue], [1, 2, 0])})
    assert [prompt.images for prompt in flat] == [prompt.images for prompt in prompts]
    assert own_prompts(None, [[1, 2]], {IMAGE: ([[red]], [1])})[0].images == prompts[0].images
    assert (
        own_prompts(["a"], None, {IMAGE: ([None], [0])})
        == own_prompts(["a"], None, {IMAGE: ([], None)})
        == [Prompt("a")]
    )


@pytest.mark.parametrize(
    ("images", "numbers", "said"),
    [
        ([object()], None, "image 0 is a object"),
        (None, [1], "images_num without all_images"),
        ([b"x", b"y"], [1], "2 images of 1 prompts"),
        ([b"x", b"y"], None, "for 1 prompts"),
    ],
)
def test_images_that_fit_no_prompt_are_refused(images: Any, numbers: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        own_prompts(["a"], None, {IMAGE: (images, numbers)})


class Struct:
    """As vLLM's SamplingParams: every field has a default, some are derived."""

    __struct_fields__ = (
        "n",
        "temperature",
        "max_tokens",
        "stop",
        "seed",
        "logprobs",
        "output_text_buffer_length",
        "_x",
    )

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(n=1, temperature=1.0, max_tokens=16, stop=None, seed=None, logprobs=None, _x=object())
        self.output_text_buffer_length = len(given.get("stop", ""))
        self.__dict__.update(given)


def test_videos_belong_to_prompts_nested_or_flat_beside_their_images() -> None:
    red, short, long = np.zeros((4, 4, 3), np.uint8), (moving(2), 2.0), (moving(3), 2.0)
    texts = ["<|video_pad|>", "<|image_pad|><|video_pad|><|video_pad|>", "none"]
    for videos, numbers in (
        ([short, [short, long], None], None),
        ([[short], [short, long], []], None),
        ([short, short, long], [1, 2, 0]),
    ):
        prompts = own_prompts(texts, None, {IMAGE: ([None, red, None], None), VIDEO: (videos, numbers)})
        assert [[one.frames for one in prompt.videos] for prompt in prompts] == [[2], [2, 3], []]
        assert [len(prompt.images) for prompt in prompts] == [0, 1, 0]
    asked = own_prompts([[{"role": "user", "content": "what?"}]], None, {VIDEO: ([long], [1])})
    assert asked[0].content[0]["content"][0] == {"type": "video"}
    for videos, numbers, said in (
        (["a.mp4"], None, "prompt 0: video 0: 'a.mp4' cannot be read"),
        (None, [1], "videos_num without all_videos"),
        ([short, long], [1], "2 videos of 1 prompts, by videos_num 1"),
    ):
        with pytest.raises(DataError, match=said):
            own_prompts(["a"], None, {VIDEO: (videos, numbers)})
    with pytest.raises((EngineError, StateError), match="setup_inference_engine"):
        FakeStrategy().gather_and_generate({}, all_prompts=["a"], all_videos=[short])


def test_sampling_options_come_as_mapping_or_as_attributes() -> None:
    assert sampling_of(None) == ({}, 1)
    assert sampling_of({"temperature": 0.5, "n": 4}) == ({"temperature": 0.5}, 4)
    assert sampling_of(SimpleNamespace(top_p=0.9, n=2, stop=None, _private=1)) == ({"top_p": 0.9}, 2)
    assert sampling_of(Struct()) == ({"max_tokens": 16}, 1)  # vLLM's own default, which its user means
    given = Struct(temperature=0.0, stop="x", n=3, logprobs=1, seed=7)
    assert sampling_of(given) == ({"temperature": 0.0, "max_tokens": 16, "stop": "x", "seed": 7}, 3)
    assert sampling_of({"logprobs": 5}) == ({"logprobs": 5}, 1)  # alternatives: the engine refuses them
    for wrong in (0, 1.5, True, "2"):
        with pytest.raises(DataError, match="at least one completion"):
            sampling_of({"n": wrong})
