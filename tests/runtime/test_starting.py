"""What is shown of a start, from its first moment on, and what is kept of it for the next one."""

import threading
from types import SimpleNamespace

import pytest

from rlbench.notebook.live.progress import StartProgress
from rlbench.runtime import registry, starting
from tests.clock import HandClock, until


class Drawn:
    """Stands for the line in a cell: notes what it would say."""

    seen: list[str]

    def __init__(self):
        self.progress = StartProgress()
        self.progress._line = self

    def show(self, text, fraction=None, below=()):
        if isinstance(text, starting.Start):
            self.progress.show(text)
        else:
            Drawn.seen.append(" | ".join([text, *below]))

    def end(self, text, seconds):
        if isinstance(text, starting.Start):
            self.progress.end(text, seconds)
        else:
            Drawn.seen.append(f"end: {text}")


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def drawn(monkeypatch, tmp_path, clock):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(starting, "_drawing", f"{__name__}:Drawn")
    monkeypatch.setattr(starting, "REDRAW_S", 0.02)
    monkeypatch.setattr(starting, "time", SimpleNamespace(monotonic=clock))
    Drawn.seen = []
    return Drawn.seen


def until_drawn(text):
    until(lambda: any(text in line for line in Drawn.seen), what=lambda: Drawn.seen)


def a_start(*parts, what="session tiny"):
    with starting.starting(what):
        for part in parts:
            with starting.phase(part, f"doing {part}"):
                until_drawn(f"doing {part}")


def test_it_shows_at_once_what_goes_on_and_ends_in_what_it_took(drawn, clock):
    with starting.starting("session tiny"):
        assert drawn == ["starting session tiny · 0 s"]
        other = threading.Thread(target=starting.say, args=("inference", "building vLLM"))  # engines start in threads
        with starting.phase("actor", "starting 2 processes"):
            other.start()
            until_drawn("actor: starting 2 processes · inference: building vLLM")
            clock.pass_by(0.2)
            starting.say("actor", "loading the weights")
            until_drawn("actor: loading the weights")
    assert drawn[-1].startswith("end: session tiny ready · ") and "actor 0.2" in drawn[-1]


def test_the_next_start_knows_how_long_it_usually_takes(drawn):
    a_start("actor")
    drawn.clear()
    a_start("actor")
    assert drawn[0] == "starting session tiny · 0 s, usually 0 s"
    assert any("… actor  doing actor, usually 0 s" in line for line in drawn)
    kept = registry.read_json(starting.times_file())
    assert len(kept["session tiny"][""]) == len(kept["session tiny"]["actor"]) == 2
    start = starting.Start("session tiny", earlier={"session tiny": {"": [1.0, 9.0, 2.0]}})
    assert start.usual() == 2.0 and start.usual("actor") is None


def test_starts_that_did_more_are_kept_apart(drawn):
    a_start("cluster", "actor")
    a_start("actor")
    a_start("actor", what="session other")
    assert set(registry.read_json(starting.times_file())) == {"session tiny + cluster", "session tiny", "session other"}
    for _ in range(starting.KEPT + 2):
        a_start()
    assert len(registry.read_json(starting.times_file())["session tiny"][""]) == starting.KEPT


def test_a_start_inside_of_another_is_a_part_of_it(drawn):
    with starting.starting("session tiny"):
        a_start("actor", what="engine actor")
    assert [line for line in drawn if line.startswith("end")] == [drawn[-1]] and "session tiny ready" in drawn[-1]
    assert list(registry.read_json(starting.times_file())) == ["session tiny"]


def test_one_that_fails_says_where_and_is_not_kept(drawn):
    def fails():
        with starting.starting("session tiny"):
            starting.say("inference", "building vLLM")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert drawn[-1].startswith("end: session tiny did not start · ") and drawn[-1].endswith(": building vLLM")
    assert registry.read_json(starting.times_file()) is None
    a_start()
    assert "ready" in drawn[-1]


def test_nothing_is_shown_of_parts_without_a_start(drawn):
    with starting.phase("actor", "starting"):
        starting.say("actor", "loading")
    assert drawn == []
