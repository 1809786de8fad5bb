"""What a chat is written with besides its messages: options of its template, and tools."""

from __future__ import annotations

from typing import Any

import pytest

from rlbench.data import as_prompts, demonstrations, labelled, load, pairs
from rlbench.data.prompts.chat import Templated, schema_of, schemas, split_chat
from rlbench.data.prompts.lengths import encoded
from rlbench.envs.bridge import bridged, opened
from rlbench.errors import DataError
from rlbench.rewards import model
from rlbench.tiny.tokenizer import build_tokenizer
from tests.data.written import written


def look(place: str, far: bool = False) -> str:
    """Look somewhere.

    Args:
        place: where to look.
        far: whether beyond the horizon.
    """
    return place


def untold(x):
    return x


def test_functions_become_tools_by_signature_and_docstring_and_openais_form_stays() -> None:
    (made,) = schemas([look])
    assert made["function"]["name"] == "look" and made["function"]["description"] == "Look somewhere."
    parameters = made["function"]["parameters"]
    assert parameters["required"] == ["place"] and parameters["properties"]["far"]["type"] == "boolean"
    assert schemas([made, made["function"]]) == [made, made]
    chat, rest = split_chat({"tools": [look], "template": {"enable_thinking": False}, "top_p": 0.5})
    assert chat == {"tools": [made], "enable_thinking": False} and rest == {"top_p": 0.5}
    assert split_chat({"top_p": 0.5}) == ({}, {"top_p": 0.5})


@pytest.mark.parametrize(
    ("given", "token"),
    [
        ({"tools": look}, "a list of functions"),
        ({"tools": []}, "a list of functions"),
        ({"tools": [untold]}, "untold"),
        ({"tools": [{"type": "function"}]}, "is no tool"),
        ({"template": "qwen"}, "options of the chat template"),
        ({"template": {"add_generation_prompt": False}}, "add_generation_prompt"),
    ],
)
def test_what_is_no_tool_or_option_is_refused(given: dict, token: str) -> None:
    with pytest.raises(DataError, match=token):
        split_chat(given)


def test_options_reach_the_template_and_one_that_it_does_not_read_is_refused() -> None:
    tokenizer = build_tokenizer(64)
    with pytest.raises(DataError, match="does not read enable_thinking"):
        Templated(tokenizer, {"enable_thinking": False})
    tokenizer.chat_template = "{{ mood }}" + tokenizer.chat_template
    moody = Templated(tokenizer, {"mood": "!"})
    said = moody.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert said == "!<|user|>a<|end|>" and moody.decode([97]) == "a" and moody("a")["input_ids"] == [97]
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        Templated(tokenizer, {"mood": "!"})


CHAT = [{"role": "user", "content": "hi"}]
BEGUN = [*CHAT, {"role": "assistant", "content": "The answer"}]


@pytest.fixture
def moody() -> Any:
    """A tokenizer whose template reads `mood` and `tools`."""
    tokenizer = build_tokenizer(1024)
    tokenizer.chat_template = "{{ mood }}{{ tools | tojson if tools else '' }}" + tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize("name", ["template", "chat_template_kwargs"])
def test_every_reader_of_data_takes_the_options_of_the_template(name: str, moody: Any) -> None:
    given: dict[str, Any] = {name: {"mood": "!"}, "tools": [look]}
    wanted = len(
        Templated(moody, {"mood": "!", "tools": schemas([look])}).apply_chat_template(
            CHAT, add_generation_prompt=True, return_dict=False
        )
    )
    assert load([CHAT], tokenizer=moody, **given).lengths[0] == wanted
    row = {"prompt": CHAT, "completion": "yes", "chosen": "yes", "rejected": "no", "label": True}
    batches = (demonstrations([row], moody, **given), pairs([row], moody, **given))
    batches = (*batches, labelled([row], moody, reference_point=False, **given))
    for batch in batches:
        assert len(batch.prompts[0]) == wanted and moody.decode(batch.prompts[0]).startswith("![{")
    with pytest.raises(DataError, match="does not read height"):
        demonstrations([row], moody, **{name: {"height": 1}})
    with pytest.raises(DataError, match="one option"):
        demonstrations([row], moody, template={"mood": "!"}, chat_template_kwargs={"mood": "!"})


def test_options_without_an_effect_are_refused(moody: Any) -> None:
    with pytest.raises(DataError, match="no effect"):
        load([CHAT], template={"mood": "!"})
    with pytest.raises(DataError, match="no chats"):
        load(["a text"], template={"mood": "!"}, tokenizer=moody)
    with pytest.raises(DataError, match="row 0: mood would have no effect"):
        demonstrations([{"prompt": "a", "completion": "b"}], moody, template={"mood": "!"})
    with pytest.raises(DataError, match="does not read tools"):
        demonstrations([{"prompt": CHAT, "completion": "b"}], build_tokenizer(64), tools=[look])
    with pytest.raises(DataError, match="one option"):
        split_chat({"template": {}, "chat_template_kwargs": {}})


def test_a_template_of_the_rows_stands_beside_options_of_the_chats(moody: Any) -> None:
    found = load([{"q": "hi"}], template="{q}", chat=True, chat_template_kwargs={"mood": "!"}, tokenizer=moody)
    assert found[0].content == CHAT and found.lengths[0] == 1 + load([CHAT], tokenizer=moody).lengths[0]


def test_a_function_without_docstring_is_told_by_its_parameters() -> None:
    def far(place, times=1): ...

    made = schema_of("distance", far)["function"]
    assert made["name"] == "distance" and made["parameters"]["required"] == ["place"]
    assert list(made["parameters"]["properties"]) == ["place", "times"]
    assert schema_of("see", look)["function"] == schemas([look])[0]["function"] | {"name": "see"}
    assert schema_of("most", max)["function"]["name"] == "most"


def test_a_chat_that_ends_with_the_assistants_words_goes_on_in_them() -> None:
    tokenizer = build_tokenizer(256)
    asked = "<|user|>hi<|end|><|assistant|>"
    (ids,) = encoded([BEGUN], tokenizer)
    assert tokenizer.decode(ids) == asked + "The answer"
    row = {"prompt": BEGUN, "completion": " is 4", "chosen": " is 4", "rejected": " is 5"}
    for batch in (demonstrations([row], tokenizer), pairs([row], tokenizer)):
        assert batch.prompts[0].tolist() == ids and tokenizer.decode(batch.responses[0]) == " is 4<|end|>"
        assert batch.mask[: batch.lengths[0]].all()
    called = [*CHAT, {"role": "assistant", "content": "a", "tool_calls": [1]}]
    assert tokenizer.decode(encoded([called], tokenizer)[0]) == asked + "a<|end|><|assistant|>"
    with pytest.raises(DataError, match=r"row 0: .*beginning of an answer"):
        demonstrations([{**row, "completion": [BEGUN[1], *CHAT, BEGUN[1]]}], tokenizer)


def test_an_environment_answers_behind_an_answer_that_was_begun() -> None:
    tokenizer = build_tokenizer(256)
    ids, messages, *_ = bridged(tokenizer, BEGUN, "wrong", "user", True, tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == "<|user|>wrong<|end|><|assistant|>" and messages[0]["content"] == "wrong"
    (prompt,) = as_prompts([BEGUN])
    begun = opened(tokenizer, prompt, encoded([BEGUN], tokenizer)[0], [], "user").ids
    assert tokenizer.decode(begun).endswith("<|assistant|>The answer")
    turned = opened(tokenizer, prompt, begun, "go", "user").ids
    assert tokenizer.decode(turned).endswith("The answer<|end|><|user|>go<|end|><|assistant|>")


def test_a_reward_model_reads_an_answer_whole() -> None:
    tokenizer = build_tokenizer(256)
    (rollout,) = written([BEGUN], [[" is 4"]]).flat
    ids = model("none").token_ids(rollout, tokenizer)
    assert tokenizer.decode(ids) == "<|user|>hi<|end|><|assistant|>The answer is 4<|end|>"
