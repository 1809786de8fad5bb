"""The first seconds of a session and of an engine: what is shown, and what an interrupt leaves."""

import _thread
import contextlib
import re
import threading
import time

import pytest

import rlbench as rb
from rlbench.dispatch.link import Link
from rlbench.errors import BuildError
from rlbench.runtime import registry, starting
from tests.clock import until
from tests.notebook.terminal import Terminal

pytestmark = pytest.mark.engine


def interrupt_at(part):
    """Ctrl-C as soon as that part of the start goes on."""

    def wait():
        while starting._current is None or part not in starting._current.parts:
            time.sleep(0.01)
        _thread.interrupt_main()

    threading.Thread(target=wait, daemon=True).start()


def test_an_engine_says_what_it_does_from_the_first_moment(cluster, tiny_path, monkeypatch):
    monkeypatch.setattr(starting, "REDRAW_S", 0.02)  # a warm process is forked in less than the half second between two
    engine = rb.InferenceEngine(str(tiny_path), name="shown")
    with contextlib.redirect_stderr(Terminal()) as terminal:
        engine.build(data_parallel_size=1)
    try:
        assert re.match(r"starting engine shown · \d+ s", terminal.drawn[0])
        assert any("shown: starting 1 process" in line for line in terminal.drawn)
        assert terminal.drawn[-1].startswith("engine shown ready · ")
        assert "engine shown" in registry.read_json(starting.times_file())
    finally:
        engine.close()


@pytest.mark.parametrize("part", ["monitor", "actor"])
def test_an_interrupt_while_it_starts_leaves_nothing(cluster, part):
    import ray

    interrupt_at(part)
    with contextlib.redirect_stderr(Terminal()) as terminal, pytest.raises(KeyboardInterrupt):
        rb.Session("tiny", name="cut")
    assert "session tiny did not start" in terminal.drawn[-1]
    until(lambda: not left_of("cut", ray), what=lambda: f"left: {left_of('cut', ray)}")
    assert not Link.exists("cut") and not registry.session_file("cut").exists()


def test_a_wrong_name_leaves_nothing_either(cluster):
    with pytest.raises(BuildError):
        rb.Session("./none", name="cut")
    assert not Link.exists("cut")


def left_of(name, ray):
    """Actors of the session that live."""
    return [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if f"rlbench/{name}/" in one["name"]]
