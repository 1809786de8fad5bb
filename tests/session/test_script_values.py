"""Values written as Python are the same values when that Python is run."""

import enum
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
from rlbench.data.origin import Origin, remember
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
    known = {
        "FILES": tmp_path,
        "saved_array": lambda name: np.load(tmp_path / name),
        "session": session,
        "saved_value": lambda name: __import__("cloudpickle").loads((tmp_path / name).read_bytes()),
        "__name__": "a_script",
    }
    exec(compile(body, "script", "exec"), known)
    return known["found"], body, renderer


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        1.5,
        float("-inf"),
        "it's \"\n",
        b"\x00",
        (1,),
        [1, (2.5, None)],
        {"a": {3, 4}},
        frozenset({1}),
        np.float32(0.5),
        np.int64(7),
        slice(1, None),
    ],
    ids=repr,
)
def test_plain_values(value, tmp_path):
    found, _, renderer = written(value, tmp_path)
    assert found == value and not renderer.files


@pytest.mark.parametrize(
    "value",
    [
        rb.rl.grpo(),
        rb.rl.grpo(clip_high=0.3),
        rb.rl.group_normalized(std="batch"),
        rb.rl.Aggregation.of("token-mean"),
        rb.Prompt([1, 2], label="x", meta={"k": 1}),
    ],
    ids=lambda v: type(v).__name__,
)
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
    value = {
        "closure": made(2),
        "object": Judge(2),
        "no source": known["f"],
        "partial": functools.partial(reward, scale=2),
    }[kind]
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
    with pytest.raises(SessionError, match=r"lock`? cannot be sent to a script"):
        written(threading.Lock(), tmp_path)


def test_a_session_keeps_no_more_than_its_share_of_the_disk(tmp_path, monkeypatch):
    from rlbench.session import script_values

    monkeypatch.setattr(script_values, "MOST_BYTES", 50_000)
    written(np.zeros(5000), tmp_path)
    written(np.zeros(5000), tmp_path)  # the same file
    with pytest.raises(SessionError, match="not kept for a script: the session has"):
        written(np.ones(5000), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


class Mode(str, enum.Enum):  # noqa: UP042 - a text that is more than one
    A = "a"


def in_cell(source, name, number, **known):
    """What a cell defines, as in a notebook: its text is where IPython would have it."""
    place = f"<cell {number}>"
    linecache.cache[place] = (len(source), None, source.splitlines(True), place)
    known = {"__name__": "__main__", **known}
    exec(compile(source, place, "exec"), known)
    return known[name]


def test_an_enum_that_is_also_a_text_stays_one(tmp_path):
    found, _, _ = written(Mode.A, tmp_path)
    assert found is Mode.A or found.value == "a"


def test_a_decorator_that_was_called_elsewhere_is_not_lost(tmp_path):
    better = decorate(reward)
    found, _, renderer = written(better, tmp_path)
    sample = next(rollouts().flat)
    assert found(sample) == better(sample) == 2 * reward(sample) and renderer.files


def test_a_batched_reward_is_written_with_its_decorator(tmp_path):
    import rlbench

    source = "@rb.rewards.batched\ndef many(samples):\n    return [float(len(s)) for s in samples]\n"
    many = in_cell(source, "many", 10, rb=rlbench)
    found, body, renderer = written(many, tmp_path)
    assert body.count("@rb.rewards.batched") == 1 and not renderer.files
    value = rollouts()
    assert np.array_equal(value.score(found).rewards, value.score(many).rewards)


def test_defaults_are_those_the_function_has_not_those_of_its_text(tmp_path):
    made = [in_cell("def f(r, k=K):\n    return float(k)\n", "f", 11, K=k) for k in (1, 2)]
    made[0].__globals__["K"] = 5  # the text would now give another default
    assert [written(fn, tmp_path)[0](None) for fn in made] == [1.0, 2.0]
    loop = in_cell("fs = [lambda r, k=k: float(k) for k in range(3)]\n", "fs", 12)
    assert [written(fn, tmp_path)[0](None) for fn in loop] == [0.0, 1.0, 2.0]


def test_what_was_changed_after_its_text_goes_as_it_is(tmp_path):
    source = "class J:\n    bonus = 1\n    def __call__(self, r):\n        return float(self.bonus)\n"
    patched = in_cell(source, "J", 13)
    found, _, renderer = written(patched, tmp_path)
    assert found()(None) == 1.0 and not renderer.files
    patched.bonus = 5
    assert written(patched, tmp_path)[0]()(None) == 5.0
    weighed = in_cell("def f(r):\n    return f.weight\n", "f", 14)
    weighed.weight = 3
    assert written(weighed, tmp_path)[2].files


def test_a_module_that_was_edited_gives_the_code_at_hand(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "edited_rewards.py"
    file.write_text("def inner(r):\n    return 1.0\ndef mine(r):\n    return inner(r)\n")
    module = importlib.import_module("edited_rewards")
    try:
        first = module.mine
        assert written(first, tmp_path / "files")[0](None) == 1.0
        file.write_text("def inner(r):\n    return 9.0 + 0\ndef mine(r):\n    return inner(r)\n")
        assert written(first, tmp_path / "files")[0](None) == 1.0  # edited, not loaded
        importlib.reload(module)
        assert written(module.mine, tmp_path / "files")[0](None) == 9.0
        use = in_cell("def use(r):\n    return edited_rewards.inner(r)\n", "use", 15, edited_rewards=module)
        assert written(use, tmp_path / "files")[0](None) == 9.0
    finally:
        del sys.modules["edited_rewards"]


def test_two_values_of_one_name_stay_apart(tmp_path):
    one = in_cell("S = 1\ndef f(r):\n    return float(S)\n", "f", 16)
    two = in_cell("S = 3\ndef f(r):\n    return float(S)\ndef g(r):\n    return float(S)\n", "g", 17)
    other = two.__globals__["f"]
    found, _, _ = written([one, two, other], tmp_path)
    assert [fn(None) for fn in found] == [1.0, 3.0, 3.0]


def test_secrets_are_asked_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTHORIZATION", "hidden-1")
    monkeypatch.setenv("API_KEY", "hidden-2")
    fn = in_cell("API_KEY = 'hidden-2'\ndef f(r):\n    return API_KEY\n", "f", 18)
    found, body, renderer = written([{"Authorization": "hidden-1", "other": "x"}, fn], tmp_path)
    assert found[0] == {"Authorization": "hidden-1", "other": "x"} and found[1](None) == "hidden-2"
    assert "hidden" not in body and not renderer.files
    remote = rb.rewards.remote("http://judge.example/score?api_key=hidden-3", headers={"Authorization": "hidden-1"})
    assert "hidden" not in Renderer(tmp_path, lambda made: None).expression(remote)


def test_a_value_whose_making_changed_since_is_kept_whole(tmp_path):
    scale = in_cell("def f(r):\n    return float(len(r) * S)\n", "f", 19, S=1)
    start = rollouts()
    remember(start, Origin("<variable>", kwargs={"session": "", "name": "rollouts_1"}))
    name = lambda made: "rollouts_1" if made.call == "<variable>" else None  # noqa: E731

    def text(value):
        return Renderer(tmp_path, name).expression(value)

    batch = start.score(scale).batch(advantage=rb.rl.group_normalized())
    assert text(batch).startswith("rollouts_1.score(f)")
    scale.__globals__["S"] = 100
    assert "from_parquet" in text(batch), "the reward is another one now"
    chosen = np.ones(6, bool)
    picked = start.select(chosen)
    chosen[:] = False
    assert picked.samples == 6 and "True, True" in text(picked)
    scored = start.score([1, 2, 3, 4, 5, 6])
    assert text(scored) == "rollouts_1.score([1, 2, 3, 4, 5, 6])"
    scored.rewards[:] = 0
    assert "from_parquet" in text(scored) and "from_parquet" in text(scored.batch(advantage=rb.rl.group_normalized()))
    foreign = remember(rollouts(), Origin("<variable>", kwargs={"session": "another", "name": "rollouts_1"}))
    kept = Renderer(tmp_path, lambda made: None).expression(foreign.score([1, 2, 3, 4, 5, 6]))
    assert "from_parquet" in kept
