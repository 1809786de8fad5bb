"""How prompts become tokens at an engine whose tokenizer has a begin token and whose template names tools."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlbench as rb
from tests.modules import beginning_tokenizer

CHAT = [{"role": "user", "content": "hi"}]
DRAWN: dict[str, Any] = {"max_tokens": 2, "progress": False}


def look(place: str) -> str:
    """Look somewhere.

    Args:
        place: where to look.
    """
    return place


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = beginning_tokenizer()
    made.chat_template = "{{ mood }}{{ tools | tojson if tools else '' }}" + made.chat_template
    return made


@pytest.fixture(scope="module")
def engine(cluster: Any, tiny_path: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("begins") / "model"
    shutil.copytree(tiny_path, folder)
    tokenizer.save_pretrained(folder)
    made = rb.InferenceEngine(str(folder), name="begins", dtype="float32", kv_cache_bytes=64 << 20)
    made.build()
    yield made
    made.close()


def test_a_rendered_text_begins_once_and_is_told(engine: Any, tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    with pytest.warns(UserWarning, match="stands there once"):
        drawn = engine.generate([text, "hi"], **DRAWN)
    assert drawn.prompt_ids[0].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert drawn.prompt_ids[0].tolist().count(256) == 1 and drawn.prompt_ids[1].tolist()[0] == 256


@pytest.mark.parametrize("name", ["template", "chat_template_kwargs"])
def test_options_of_the_template_are_taken_by_both_names(engine: Any, tokenizer: Any, name: str) -> None:
    drawn = engine.generate([CHAT], **DRAWN, **{name: {"mood": "!"}})
    assert tokenizer.decode(drawn.prompt_ids[0]).startswith("!<|endoftext|><|user|>hi")


def test_an_environment_of_tools_tells_the_model_which_there_are(engine: Any, tokenizer: Any) -> None:
    env = rb.envs.tools({"see": look})
    told = tokenizer.decode(engine.generate([CHAT], env=env, max_turns=1, **DRAWN).prompt_ids[0])
    assert '"name": "see"' in told and "where to look" in told
    own = tokenizer.decode(engine.generate([CHAT], env=env, max_turns=1, tools=[look], **DRAWN).prompt_ids[0])
    assert '"name": "look"' in own and '"see"' not in own


def test_a_request_with_rendered_texts_has_them_begin_once() -> None:
    from rlbench.workers.replica.serving.app import begins_once
    from rlbench.workers.replica.serving.refusal import Refusal

    for prompt in ("<s>hi", ["<s>hi", "<s>ho"]):
        asked = {"prompt": prompt}
        assert begins_once(asked, "<s>") and asked["add_special_tokens"] is False
    for plain in (
        {"prompt": "hi"},
        {"prompt": [1, 2]},
        {"messages": []},
        {"prompt": "<s>a", "add_special_tokens": True},
    ):
        before = dict(plain)
        assert not begins_once(plain, "<s>") and plain == before
    assert not begins_once({"prompt": "<s>hi"}, "")
    with pytest.raises(Refusal, match="some prompts begin"):
        begins_once({"prompt": ["<s>hi", "ho"]}, "<s>")
