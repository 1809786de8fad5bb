"""What a session is asked for is checked before anything starts."""

import json

import pytest

import rlbench as rb
from rlbench.errors import BuildError, SessionError
from rlbench.session.building import check_models, check_options
from rlbench.session.options import SessionOptions, checked, resolve_model


def test_an_option_nobody_reads_is_refused_with_the_nearest_and_all_there_are():
    with pytest.raises(SessionError, match=r"train: unknown option 'leraning_rate'.*there are betas, lr"):
        checked("train", {"leraning_rate": 1e-3}, {"lr", "betas"})
    with pytest.raises(SessionError, match="nearest: max_norm"):
        check_options({"max_nrom": 1.0}, None)


@pytest.mark.parametrize("given", [None, {}])
def test_no_options_are_no_options(given):
    assert check_options(given, given) == ({}, {})


def test_each_engine_takes_its_own_options():
    train = {"lr": 1e-5, "betas": (0.9, 0.95), "tensor_parallel_size": 2, "max_norm": 0.5, "threads": 1}
    inference = {"kv_cache_bytes": 1 << 20, "max_model_len": 64, "data_parallel_size": 2}
    assert check_options(train, inference) == (train, inference)
    with pytest.raises(SessionError, match="inference: unknown option 'lr'"):
        check_options(None, {"lr": 1e-5})
    with pytest.raises(SessionError, match="train: unknown option 'kv_cache_bytes'"):
        check_options({"kv_cache_bytes": 1}, None)


def test_how_the_policy_is_held_is_an_option_that_must_be_able_to_act():
    for train in ({"use_mp_opt": True, "fsdp_cpu_offload": True, "bf16": True}, {"use_mp_opt": False, "bf16": False}):
        assert check_options(train, None) == (train, {})
    for name, other in (("use_mp_opt", "bf16"), ("use_mp_opt", "masters"), ("fsdp_cpu_offload", "masters")):
        with pytest.raises(SessionError, match=f"{name} has no effect with {other}=False"):
            check_options({name: True, other: False}, None)


@pytest.mark.parametrize("architecture", ["Qwen2_5_VLForConditionalGeneration", "Qwen2ForSequenceClassification"])
def test_a_folder_of_no_causal_language_model_is_refused_before_anything_starts(architecture, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen", "architectures": [architecture]}))
    with pytest.raises(BuildError, match=architecture):
        check_models(str(tmp_path), None)
    with pytest.raises(BuildError, match=architecture):
        rb.Session(str(tmp_path))


@pytest.mark.parametrize("architectures", [["Qwen2ForCausalLM"], ["GPT2LMHeadModel"], ["MyQwenModel"], [], None])
def test_a_causal_language_model_may_be_of_a_class_of_the_users_own(architectures, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": architectures}))
    check_models(str(tmp_path), "hub/id")


@pytest.mark.parametrize("name", ["path", "seed", "trainable"])
def test_what_the_session_itself_sets_cannot_be_given_twice(name):
    with pytest.raises(SessionError, match=f"unknown option '{name}'"):
        check_options({name: 1}, None)


def test_the_options_given_are_not_the_callers_dictionary():
    given = {"lr": 1e-5}
    train, _ = check_options(given, None)
    train["lr"] = 1.0
    assert given == {"lr": 1e-5}


def test_settings_survive_the_monitors_journal():
    options = SessionOptions("tiny", "folder", 3, {"lr": 1e-5}, {"max_model_len": 64}, "other")
    assert SessionOptions(**json.loads(json.dumps(options.to_json()))) == options


def test_a_folder_or_hub_id_is_taken_as_it_is():
    assert resolve_model("some/model") == "some/model"
