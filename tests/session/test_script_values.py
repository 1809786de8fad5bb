"""Values written as Python are the same values when that Python is run."""

import functools
import importlib
import json
import linecache
import math
import sys
import threading

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import SessionError
from rlbench.session.script_values import Renderer
from tests.data.values import rollouts

WEIGHT = 0.25
TABLE = {"a": [1, 2], "b": float("inf")}


def helper(value):
    return WEIGHT * value


def reward(rollout, scale=WEIGHT):
    return helper(len(rollout)) + TABLE["a"][1] * scale + math.floor(1.5)


def decorate(fn):
    @functools.wraps(fn)
    def wrapped(rollout):
        return fn(rollout) * 2

    return wrapped


@decorate
def decorated(rollout):
    return reward(rollout)


class Judge:
    """Has state and a base of its own."""

    bonus = WEIGHT

    def __init__(self, extra):
        self.extra = extra

    def __call__(self, rollout):
        return helper(len(rollout)) + self.bonus + self.extra


class Stricter(Judge):
    def __call__(self, rollout):
        return super().__call__(rollout) - 1


def written(value, tmp_path, session=None):
    """The value that a script with this expression has; and the script."""
    renderer = Renderer(tmp_path, lambda made: None, session)
    text = renderer.expression(value)
    body = "\n".join(
        [*renderer.imports, "import rlbench as rb", *(code for _, code in renderer.defines), f"found = {text}"]
    )
    known = {"FILES": tmp_path, "saved_array": lambda name: np.load(tmp_path / name), "session": session,
             "saved_value": lambda name: __import__("cloudpickle").loads((tmp_path / name).read_bytes()),
             "__name__": "a_script"}  # fmt: skip
    exec(compile(body, "script", "exec"), known)
    return known["found"], body, renderer


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 1.5, float("-inf"), "it's \"\n", b"\x00", (1,), [1, (2.5, None)], {"a": {3, 4}}, frozenset({1}),
     np.float32(0.5), np.int64(7), slice(1, None)],
    ids=repr,
)  # fmt: skip
def test_plain_values(value, tmp_path):
    found, _, renderer = written(value, tmp_path)
    assert found == value and not renderer.files


@pytest.mark.parametrize(
    "value",
    [rb.rl.grpo(), rb.rl.grpo(clip_high=0.3), rb.rl.group_normalized(std="batch"), rb.rl.Aggregation.of("token-mean"),
     rb.Prompt([1, 2], label="x", meta={"k": 1})],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_values_of_rlbench_are_written_as_the_call_that_makes_them(value, tmp_path):
    found, body, renderer = written(value, tmp_path)
    assert found == value and type(found) is type(value) and not renderer.files
    assert "rb." in body and "import rlbench.rl" not in body


@pytest.mark.parametrize("size", [3, 5000])
def test_arrays_short_and_long(size, tmp_path):
    value = np.arange(size, dtype=np.float32) / 3
    found, _, renderer = written(value, tmp_path)
    assert found.dtype == value.dtype and np.array_equal(found, value)
    assert bool(renderer.files) == (size > 100)


def test_a_function_comes_with_what_it_uses_and_nothing_else(tmp_path):
    found, body, renderer = written(reward, tmp_path)
    sample = next(rollouts().flat)
    assert found(sample) == reward(sample)
    assert "def helper" in body and "WEIGHT = 0.25" in body and "import math" in body
    assert "class Judge" not in body and "pytest" not in body and not renderer.files
    assert body.index("WEIGHT = ") < body.index("def helper") < body.index("def reward")


def test_a_decorated_function_keeps_its_decorator(tmp_path):
    found, body, _ = written(decorated, tmp_path)
    sample = next(rollouts().flat)
    assert found(sample) == decorated(sample) == 2 * reward(sample) and "@decorate" in body


def test_a_class_comes_with_its_base(tmp_path):
    found, body, renderer = written(Stricter, tmp_path)
    sample = next(rollouts().flat)
    assert found(3)(sample) == Stricter(3)(sample) and not renderer.files
    assert body.index("class Judge") < body.index("class Stricter")


def test_a_lambda_stands_where_it_is_used(tmp_path):
    two = [lambda r: helper(len(r)), lambda r: -1.0]
    sample = next(rollouts().flat)
    for fn in two:
        found, body, renderer = written(fn, tmp_path)
        assert found(sample) == fn(sample) and not renderer.files
    assert "(lambda r: -1.0)" in body


def test_a_local_name_that_a_global_has_too_is_not_taken_along(tmp_path):
    source = "sample = object()\ndef f(sample):\n    total = sample\n    return total\n"
    linecache.cache["<cell 1>"] = (len(source), None, source.splitlines(True), "<cell 1>")
    known = {"__name__": "__main__", "total": open}
    exec(compile(source, "<cell 1>", "exec"), known)
    found, body, renderer = written(known["f"], tmp_path)
    assert found(3) == 3 and not renderer.files and not renderer.imports and "total = <" not in body


def test_functions_of_installed_packages_are_imported(tmp_path):
    found, body, _ = written({"a": np.mean, "b": math.sqrt, "c": json.dumps, "d": len}, tmp_path)
    assert found == {"a": np.mean, "b": math.sqrt, "c": json.dumps, "d": len} and "import numpy" in body


@pytest.mark.parametrize("kind", ["closure", "object", "no source", "partial"])
def test_what_has_no_text_lies_in_a_file_or_is_called_again(kind, tmp_path):
    def made(extra):
        return lambda r: len(r) + extra

    known = {}
    exec("def f(r): return len(r) + 2", known)
    value = {"closure": made(2), "object": Judge(2), "no source": known["f"],
             "partial": functools.partial(reward, scale=2)}[kind]  # fmt: skip
    found, _, renderer = written(value, tmp_path)
    sample = next(rollouts().flat)
    assert found(sample) == value(sample)
    assert bool(renderer.files) == (kind != "partial")


def test_a_local_module_is_written_out(tmp_path, monkeypatch):
    code = "import math\nSCALE = 3\ndef inner(r): return SCALE * len(r)\ndef mine(r): return math.ceil(inner(r))\n"
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("my_rewards")
    try:
        found, body, renderer = written(module.mine, tmp_path / "files")
    finally:
        del sys.modules["my_rewards"]
    sample = next(rollouts().flat)
    assert found(sample) == 3 * len(sample) and "my_rewards" not in body and not renderer.files


def test_a_function_that_takes_a_name_the_script_needs_goes_by_file(tmp_path):
    source = "def saved_value(r):\n    return 4.0\n"
    linecache.cache["<cell 2>"] = (len(source), None, source.splitlines(True), "<cell 2>")
    known = {"__name__": "__main__"}
    exec(compile(source, "<cell 2>", "exec"), known)
    found, _, renderer = written(known["saved_value"], tmp_path)
    assert found(None) == 4.0 and renderer.files


def test_batches_and_rollouts_without_an_origin_are_kept_whole(tmp_path):
    batch = rollouts().score(len).batch(advantage=rb.rl.group_normalized())
    bare = batch.__class__(**{name: getattr(batch, name) for name in batch.__dataclass_fields__})
    found, _, renderer = written(bare, tmp_path)
    assert found.key == batch.key and np.array_equal(found.advantages, batch.advantages) and len(renderer.files) == 1


def test_what_cannot_be_written_says_so(tmp_path):
    with pytest.raises(SessionError, match=r"lock cannot be written down \(TypeError"):
        written(threading.Lock(), tmp_path)


def test_a_session_keeps_no_more_than_its_share_of_the_disk(tmp_path, monkeypatch):
    from rlbench.session import script_values

    monkeypatch.setattr(script_values, "MOST_BYTES", 50_000)
    written(np.zeros(5000), tmp_path)
    written(np.zeros(5000), tmp_path)  # the same file
    with pytest.raises(SessionError, match="not kept for a script: the session has"):
        written(np.ones(5000), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
