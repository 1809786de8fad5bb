"""A stream gives every prompt once an epoch, in an order that its seed fixes, and goes on exactly where it stood."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbench.data import as_prompts, mix
from rlbench.errors import DataError
from tests.data.comparing import labels, numbered


@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 99), st.booleans())
def test_each_epoch_has_every_prompt_once_however_it_is_taken(size, takes, seed, shuffle):
    stream = numbered(size).stream(seed, shuffle)
    parts = [labels(stream.take(n)) for n in takes]
    assert [len(part) for part in parts] == takes
    found = [label for part in parts for label in part]
    for start in range(0, len(found) - size + 1, size):
        assert sorted(found[start : start + size]) == list(range(size))
    assert stream.taken == len(found) == stream.epoch * size + stream.position
    assert found == labels(numbered(size).stream(seed, shuffle).take(len(found)))


def test_epochs_are_shuffled_anew_or_kept_in_order():
    shuffled = numbered(20).stream(seed=1)
    first, second = labels(shuffled.take(20)), labels(shuffled.take(20))
    assert first != second and first != list(range(20))
    assert labels(numbered(20).stream(seed=2).take(20)) != first
    assert labels(numbered(3).stream(shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]


@given(st.integers(1, 7), st.integers(0, 20), st.booleans())
def test_a_state_resumes_exactly_anywhere(size, before, shuffle):
    stream = numbered(size).stream(3, shuffle)
    if before:
        stream.take(before)
    state = json.loads(json.dumps(stream.state()))
    again = numbered(size).stream(3, shuffle).restore(state)
    assert again.taken == before and labels(again.take(17)) == labels(stream.take(17))
    assert labels(stream.restore(state).take(5)) == labels(numbered(size).stream(3, shuffle).take(before + 5))[before:]


def test_a_state_resumes_in_a_new_process():
    stream = numbered(11).stream(seed=5)
    stream.take(17)
    code = (
        "import sys, json; from tests.data.comparing import numbered\n"
        "print([p.label for p in numbered(11).stream(seed=5).restore(json.loads(sys.argv[1])).take(30)])"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(stream.state())], capture_output=True, text=True)
    assert json.loads(done.stdout or "0") == labels(stream.take(30)), done.stderr


def test_it_stops_after_its_epochs():
    stream = numbered(3).stream(on_end="stop", shuffle=False)
    assert labels(stream.take(2)) == [0, 1] and not stream.ended
    assert labels(stream.take(2)) == [2] and stream.ended and stream.take(2) == [] and stream.taken == 3
    again = numbered(3).stream(on_end="stop", shuffle=False).restore(stream.state())
    assert again.ended and again.take(1) == []
    twice = numbered(3).stream(on_end="stop", epochs=2)
    assert [len(twice.take(4)) for _ in range(3)] == [4, 2, 0]


def test_a_state_of_other_prompts_is_refused_and_nothing_moves():
    stream = numbered(5).stream(seed=1)
    stream.take(3)
    for changed in (numbered(6), numbered(5)[::-1]):
        other = changed.stream(seed=1)
        other.take(2)
        with pytest.raises(DataError, match="of numbers is of other prompts"):
            other.restore(stream.state())
        assert other.taken == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": 2}, "seed=1, .*seed=2"),
        ({"seed": 1, "shuffle": False}, "shuffle=True, .*shuffle=False"),
        ({"seed": 1, "on_end": "stop"}, "epochs=None, .*epochs=1"),
    ],
)
def test_a_state_of_other_options_is_refused(options, said):
    with pytest.raises(DataError, match=said):
        numbered(5).stream(**options).restore(numbered(5).stream(seed=1).state())


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "mixture"},
        {"format": 99},
        {"format": None},
        {"position": 5},
        {"position": -1},
        {"position": "1"},
        {"epoch": None},
        {"epoch": True},
    ],
    ids=str,
)
def test_a_state_that_is_none_is_refused(change):
    state = numbered(5).stream().state()
    numbered(5).stream().restore(state)
    with pytest.raises(DataError, match="restore: "):
        numbered(5).stream().restore({**state, **change})


@pytest.mark.parametrize("nothing", [None, [], "text", {}])
def test_what_is_no_state_at_all_is_refused(nothing):
    with pytest.raises(DataError, match="state"):
        numbered(5).stream().restore(nothing)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed="),
        ({"seed": 1.5}, "seed=1.5"),
        ({"on_end": "rewind"}, "on_end='rewind'"),
        ({"epochs": 2}, "epochs=2"),
        ({"on_end": "stop", "epochs": 0}, "epochs=0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(DataError, match=said):
        numbered(5).stream(**options)


@pytest.mark.parametrize("n", [0, -1, 1.0])
def test_taking_no_prompts_is_refused(n):
    with pytest.raises(DataError, match="take"):
        numbered(5).stream().take(n)


def test_a_stream_where_prompts_are_wanted_says_how_to_take_some():
    """Walking over one without end would hang."""
    with pytest.raises(DataError, match=r"got PromptStream: take some of it, \.take\(n\)"):
        as_prompts(numbered(3).stream())
    with pytest.raises(DataError, match=r"got Mixture: take some of it"):
        as_prompts(mix({"a": numbered(3)}))


def test_an_empty_set_has_nothing_to_stream():
    with pytest.raises(DataError, match="numbers has no prompts"):
        numbered(0).stream()


def test_its_text_tells_where_it_stands():
    stream = numbered(5).stream(seed=4, on_end="stop", epochs=2)
    stream.take(7)
    assert repr(stream) == "PromptStream(numbers: epoch 2 of 2, 2 of 5 prompts · shuffled, seed 4)"
    stream.take(9)
    assert repr(stream) == "PromptStream(numbers: ended · shuffled, seed 4)"
