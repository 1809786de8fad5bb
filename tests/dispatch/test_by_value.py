"""A user's code as it travels: local modules go by value, recursively, and what is the same has the same identity."""

import gc
import importlib
import json
import subprocess
import sys
import textwrap
import types

import pytest

from rlbench.dispatch import by_value
from rlbench.errors import EngineError


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with modules of a user's own, importable here and gone afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two edits within a second have the same time stamp

    def write(name, text):
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return importlib.reload(sys.modules[name]) if name in sys.modules else importlib.import_module(name)

    yield write
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def elsewhere(blob, argument):
    """Call a pickled function in a process that cannot import the user's modules."""
    code = "import sys, json, cloudpickle; f = cloudpickle.loads(sys.stdin.buffer.read()); print(json.dumps(f(%r)))"
    done = subprocess.run([sys.executable, "-c", code % argument], input=blob, capture_output=True, cwd="/")
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def test_a_local_module_comes_along_with_what_it_imports_and_is_new_after_a_reload(project):
    project("rlb_user_inner", "SCALE = 3\ndef scaled(x): return SCALE * x")
    project("rlb_user_outer", "from rlb_user_inner import scaled\ndef both(x): return scaled(x) + 1")
    outer = sys.modules["rlb_user_outer"]
    first = by_value.dumps(outer.both)
    assert elsewhere(first, 5) == 16
    project("rlb_user_inner", "SCALE = 10\ndef scaled(x): return SCALE * x")
    outer = importlib.reload(outer)
    assert elsewhere(by_value.dumps(outer.both), 5) == 51
    assert by_value.dumps(outer.both) != first


def test_modules_used_as_modules_come_along_even_where_they_import_each_other(project):
    project("rlb_user_a", "def even(n): return n == 0 or rlb_user_b.odd(n - 1)")
    project("rlb_user_b", "import rlb_user_a\ndef odd(n): return n != 0 and rlb_user_a.even(n - 1)")
    a = project("rlb_user_a", "import rlb_user_b\ndef even(n): return n == 0 or rlb_user_b.odd(n - 1)")
    assert elsewhere(by_value.dumps(a.even), 10) is True


def test_installed_code_goes_by_name_and_the_list_of_modules_is_left_as_it_was(project):
    import cloudpickle
    import numpy
    import torch

    import rlbench.rl

    module = project("rlb_user_plain", "def f(x): return x")
    assert by_value.is_local(module)
    others = (numpy, json, torch.ops, torch.classes, rlbench.rl, sys.modules["__main__"], pytest)
    assert not any(map(by_value.is_local, others))
    before = cloudpickle.list_registry_pickle_by_value()
    assert len(by_value.dumps(numpy.linalg.norm)) < 100 < len(by_value.dumps(module.f))
    assert cloudpickle.list_registry_pickle_by_value() == before


def make(text):
    """What the text of a cell defines, as a notebook's namespace would have it."""
    space = {"__name__": "__main__"}
    exec(compile(text, "<cell 1>", "exec"), space)
    return space["Thing"]


@pytest.mark.parametrize("kind", ["class Thing:\n  {base}def f(self): return {n}", "def Thing(x): return {n} * x"])
def test_the_identity_is_that_of_the_code_and_not_of_the_object(kind):
    one, again, other = (make(kind.format(base="", n=n)) for n in (1, 1, 2))
    assert by_value.identity(one) == by_value.identity(again) != by_value.identity(other)


def test_the_identity_changes_with_what_the_code_refers_to():
    def of(scale):
        def loss(x):
            return scale * x

        return loss

    assert by_value.identity(of(1)) == by_value.identity(of(1)) != by_value.identity(of(2))


def test_what_cannot_be_pickled_raises_and_leaves_the_list_of_modules(project):
    import cloudpickle

    module = project("rlb_user_lock", "import threading\nLOCK = threading.Lock()\ndef f(x):\n    with LOCK: return x")
    with pytest.raises(EngineError, match="`LOCK`"):
        by_value.dumps(module.f)
    assert module.__name__ not in cloudpickle.list_registry_pickle_by_value()


def test_modules_that_other_threads_import_meanwhile_do_not_disturb():
    """A session that was built once failed so: a collection let another thread import while the list was made."""
    added = []

    def import_one(phase, info):
        added.append(f"imported_meanwhile_{len(added)}")
        sys.modules[added[-1]] = types.ModuleType(added[-1])

    by_value.dumps(len)  # every other module was looked at
    pairs = [(number, str(number)) for number in range(4000)]  # none is left that the interpreter would use again
    threshold = gc.get_threshold()
    gc.callbacks.append(import_one)
    gc.set_threshold(1)
    try:
        assert by_value.dumps(len)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(import_one)
        for name in added:
            sys.modules.pop(name, None)
    assert added and pairs


def test_modules_are_looked_through_again_where_one_came_or_went(project):
    known = by_value._own_modules()
    assert by_value._own_modules() is known  # nothing came, so nothing was looked at
    first = project("rlb_user_first", "THREE = 3")
    assert first in by_value._own_modules()
    del sys.modules["rlb_user_first"]  # one goes and another comes: there are as many as before
    second = project("rlb_user_second", "FOUR = 4")
    assert (first in by_value._own_modules(), second in by_value._own_modules()) == (False, True)
