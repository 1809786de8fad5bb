"""What a session is asked for is checked before anything starts."""

import inspect
import json
from pathlib import Path

import pytest

import rlbench as rb
from rlbench import cli
from rlbench.errors import BuildError
from rlbench.options import OptionError
from rlbench.session.building import check_models
from rlbench.session.options import SessionOptions, Train, resolve_model


def test_each_engine_takes_its_own_options_from_a_value_a_dict_or_nothing() -> None:
    given = {"lr": "1e-5", "betas": [0.9, 0.95], "shards": 2, "max_norm": 0.5, "threads": 1}
    train = Train.of(given)
    assert train == rb.Train(lr=1e-5, betas=(0.9, 0.95), shards=2, max_norm=0.5, threads=1) == Train.of(train)
    assert rb.Train(actor_learning_rate=1e-5) == rb.Train(lr=1e-5)
    assert Train.of(None) == Train.of({}) == rb.Train()
    assert dict(rb.Inference(max_model_len=64)) == {"max_model_len": 64}
    for cls, name, near in (
        (rb.Train, "leraning_rate", "lr"),
        (rb.Train, "kv_cache_bytes", ""),
        (rb.Train, "tensor_parallel_size", "shards"),
        (rb.Train, "path", ""),
        (rb.Inference, "lr", ""),
        (rb.Inference, "seed", ""),
    ):
        with pytest.raises(OptionError, match=f"{name}.*{near}"):
            cls(**{name: 1})


def test_a_value_shows_what_differs_and_its_signature_and_help_what_there_is() -> None:
    assert repr(rb.Train(shards=2)) == "Train(shards=2)"
    assert {"lr", "shards", "use_mp_opt"} <= set(inspect.signature(rb.Train).parameters)
    assert "longest prompt" in (rb.Inference.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "other"), [("use_mp_opt", "bf16"), ("use_mp_opt", "masters"), ("fsdp_cpu_offload", "masters")]
)
def test_how_the_policy_is_held_is_an_option_that_must_be_able_to_act(name: str, other: str) -> None:
    with pytest.raises(OptionError, match=f"{name} has no effect with {other}"):
        rb.Train(**{name: True, other: False})


@pytest.mark.parametrize("architecture", ["LlavaForConditionalGeneration", "Qwen2ForSequenceClassification"])
def test_a_folder_of_no_causal_language_model_is_refused_before_anything_starts(architecture, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen", "architectures": [architecture]}))
    with pytest.raises(BuildError, match=architecture):
        check_models(str(tmp_path), None)
    with pytest.raises(BuildError, match=architecture):
        rb.Session(str(tmp_path))


@pytest.mark.parametrize(
    "architectures",
    [
        ["Qwen2ForCausalLM"],
        ["Qwen2_5_VLForConditionalGeneration"],
        ["Qwen2AudioForConditionalGeneration"],
        ["GPT2LMHeadModel"],
        ["MyQwenModel"],
        [],
        None,
    ],
)
def test_a_causal_language_model_may_be_of_a_class_of_the_users_own(architectures, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": architectures}))
    check_models(str(tmp_path), "hub/id")
    check_models(str(tmp_path), classifiers=True)


def test_settings_survive_the_monitors_journal() -> None:
    train, inference = rb.Train(lr=1e-5, betas=(0.9, 0.95)), rb.Inference(engine_kwargs={"seed": 1})
    options = SessionOptions("tiny", "folder", 3, train, inference, "other")
    assert SessionOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
    assert options.to_json()["train"] == {"lr": 1e-5, "betas": [0.9, 0.95]}


def test_a_folder_or_hub_id_is_taken_as_it_is():
    assert resolve_model("some/model") == "some/model"


def test_the_page_of_options_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["options"]) == 0
    page = Path(__file__).parents[2] / "docs" / "options.md"
    assert capsys.readouterr().out == page.read_text(), "rlbench options > docs/options.md"
