"""What a cell shows that ends with a verb: one card, the same as text, and no raw dict."""

import inspect
import pickle

import pytest
from IPython.core.interactiveshell import InteractiveShell

import rlbench as rb
from rlbench.engines.moved import Moved
from rlbench.engines.redefine import Redefined
from rlbench.notebook import formatters
from rlbench.results import Done, ExportedModel, Names, Result
from rlbench.session.session import Session
from rlbench.session.training.session_trainer import TrainerPlace
from rlbench.weights.sync import Synced

GIB = 2**30
SYNCED = Synced(42, 48 << 20, 26, "shm", 1e-6, 1e-4, 0.02)
MOVED = Moved.of(
    "inference",
    ("weights", "kv_cache"),
    [
        {"weights": "cuda", "kv_cache": "meta", "version": 3, "freed_bytes": GIB},
        {"weights": "cuda", "kv_cache": "meta", "version": 3, "freed_bytes": GIB},
    ],
)
RELEASED = Moved.of(
    "actor",
    ("weights", "optimizer"),
    [
        {"weights": "meta", "optimizer": "cuda", "freed": GIB, "taken": 0, "lost": ["trained weights"]},
    ],
)
EXPORTED = ExportedModel("/models/mine", GIB, ("config.json", "model.safetensors"))
PLACE = TrainerPlace(3, 12, 0.01, 3)


@pytest.fixture
def shell():
    InteractiveShell.clear_instance()  # of an earlier test: a terminal's shell shows no HTML
    made = InteractiveShell.instance()
    formatters.install()
    yield made
    InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (SYNCED, ["weights synced", "v42", "1e-06 nats", "48 MiB in 26 tensors by shm"]),
        (
            Synced(42, 12 << 20, 24, "shm", 1e-6, 1e-4, 0.02, 26, 36 << 20),
            ["12 MiB of 48 MiB in 24 tensors (26 unchanged) by shm at 600 MiB/s"],
        ),
        (Synced(42, 1, 1, "shm", None, 1e-4, 0.1), ["waits for the KV cache", "session.onload('inference')"]),
        (MOVED, ["inference", "weights ● resident", "kv cache ◌ released", "freed 2 GiB", "v3"]),
        (RELEASED, ["optimizer ● resident", "freed 1 GiB", "⚠ lost: trained weights"]),
        (EXPORTED, ["/models/mine", "1 GiB", "config.json, model.safetensors"]),
        (Done("generation is held", "session.resume() goes on"), ["generation is held", "session.resume()"]),
        (Names("dropped", ["before step 3"]), ["dropped", "before step 3"]),
        (PLACE, ["3 iterations", "12 optimizer steps"]),
        (
            Redefined("Policy", "8f3a77", True, 2, ("__init__ does not run again",)),
            ["Policy", "redefined", "8f3a", "⚠"],
        ),
    ],
)
def test_each_value_has_one_card_and_says_the_same_as_text(shell, value, words):
    data, _ = shell.display_formatter.format(value)
    for word in words:
        assert word in data["text/plain"] and word.replace("'", "&#x27;") in data["text/html"].replace("&nbsp;", " ")
    assert "{" not in repr(value) and "<" not in repr(value) and len(repr(value)) < 200
    assert type(pickle.loads(pickle.dumps(value))) is type(value)


def test_results_are_read_as_attributes_and_by_name():
    assert SYNCED.bytes_per_s == (48 << 20) / 0.02 and "48 MiB in 26 tensors by shm at 2.34 GiB/s" in repr(SYNCED)
    assert SYNCED.gap == SYNCED["gap"] == 1e-6 and dict(SYNCED)["version"] == 42 and SYNCED == SYNCED
    assert MOVED["kv_cache"] == "meta" and MOVED.freed == MOVED["freed"] == 2 * GIB and "kv_cache" in MOVED
    with pytest.raises(KeyError, match="nearest: version"):
        SYNCED["verson"]
    assert SYNCED.get("verson") is None and SYNCED.get("version") == SYNCED.version and "verson" not in SYNCED
    with pytest.raises(AttributeError, match="nearest: transport"):
        _ = SYNCED.tranport
    assert Names("dropped", ["a"]) == ["a"] and isinstance(PLACE, Result)


def test_no_verb_returns_a_raw_dict_or_nothing():
    """By the annotation of every public verb of a session and of what the engines do to their state."""
    kept = {
        "close",
        "facts",
        "record",
        "advance",
        "note_place",
        "move_place",
        "trainer_went_back",
        "logprobs",
        "status",
        "memory",
        "control",
        "controls",
        "publish_state",
        "discard",
        "complete_names",
        "methods",
        "run",
        "run_cell",
        "run_script",
        "follow",
        "replicas_can_sync",
        "staged_fields",
        "note_info",
        "encoded",
        "define_again",
        "weight_versions",
        "state_dict",
        "load_state_dict",
        "load",
        "release_memory_cache",
    }
    for cls in (Session, rb.TrainEngine, rb.InferenceEngine):
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if name.startswith("_") or name in kept:
                continue
            returned = str(inspect.signature(method).return_annotation)
            assert not returned.startswith(("dict", "None", "list")), f"{cls.__name__}.{name} -> {returned}"
