"""What is given for a model's name, and is none, is refused at once, before a cluster or a worker is started."""

from types import SimpleNamespace

import pytest
import torch

import rlbench as rb
from rlbench.engines.paths import check_model_path, model_name
from rlbench.errors import BuildError

TOKENIZER = type(
    "PreTrainedTokenizerFast",
    (),
    {
        "name_or_path": "models/qwen",
        "convert_tokens_to_ids": len,
        "__call__": lambda self, text=None: text,
    },
)()
RUNNING = SimpleNamespace(name="demo", link=object())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.nn.Linear(2, 2), "save_pretrained"),
        (TOKENIZER, "models/qwen"),
        (RUNNING, "rb.attach"),
        (None, "NoneType"),
        ("", "empty"),
        (7, "int"),
    ],
)
def test_an_object_in_the_place_of_a_name(given, said):
    for taker in (rb.Session, rb.InferenceEngine):
        with pytest.raises(BuildError, match=said):
            taker(given)


def test_a_training_engine_takes_a_module_or_what_makes_one():
    for given in (TOKENIZER, "tiny", 7):
        with pytest.raises(BuildError, match=type(given).__name__):
            rb.TrainEngine(given)


@pytest.mark.engine
def test_a_training_engine_without_a_module_builds_nothing(cluster):
    with pytest.raises(BuildError, match="no module"):
        rb.TrainEngine(None).build()


def test_a_mistyped_folder_that_looks_like_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen-sort").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the answer must not need the network
    for given, near in (("models/qwen-srot", "nearest: qwen-sort"), ("tinny", "nearest: tiny")):
        with pytest.raises(BuildError, match=near):
            check_model_path(given)
        with pytest.raises(BuildError, match=near):
            rb.Session(given)
    with pytest.raises(BuildError, match=r"no config\.json"):
        check_model_path("models/qwen-sort")


def test_names_pass_as_they_are(tmp_path):
    assert model_name(tmp_path, "rb.Session") == str(tmp_path) and model_name("tiny", "rb.Session") == "tiny"
