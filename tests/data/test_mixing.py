"""A mixture keeps the shares asked for at every length, says where each prompt is from, and resumes exactly."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbench.data import Prompt, PromptSet, mix
from rlbench.errors import DataError
from tests.data.comparing import labels, numbered


def sources(prompts):
    return [p.meta["source"] for p in prompts]


def two(**options):
    return mix({"gsm": (numbered(7, "a"), 0.7), "code": (numbered(3, "b"), 0.3)}, **options)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(1, 200))
def test_every_stretch_from_the_start_has_the_shares_to_within_a_prompt_per_set(weights, n):
    mixture = mix([numbered(4, f"s{i}") for i in range(len(weights))], weights)
    counts = Counter(sources(mixture.take(n)))
    for i, weight in enumerate(weights):
        assert abs(counts[f"s{i}"] - n * weight / sum(weights)) < max(len(weights) - 1, 1)
    assert mixture.counts == {f"s{i}": counts[f"s{i}"] for i in range(len(weights))} and mixture.taken == n


def test_batches_in_the_middle_have_the_shares_too():
    mixture = two()
    for _ in range(30):
        assert Counter(sources(mixture.take(20)))["gsm"] in (13, 14, 15)
    assert mixture.counts == {"gsm": 420, "code": 180}


def test_each_set_goes_through_its_prompts_epoch_by_epoch():
    taken = two(seed=1).take(100)
    gsm = [p.label for p in taken if p.meta["source"] == "gsm"]
    for start in range(0, 70, 7):
        assert sorted(gsm[start : start + 7]) == list(range(7))
    assert gsm[:7] != gsm[7:14]
    in_order = [p.label for p in two(shuffle=False).take(30) if p.meta["source"] == "code"]
    assert in_order == [0, 1, 2] * 3


def test_the_seed_fixes_the_order():
    assert two(seed=1).take(50) == two(seed=1).take(50)
    assert labels(two(seed=1).take(50)) != labels(two(seed=2).take(50))


def test_a_prompt_says_its_set_and_keeps_what_its_row_said():
    given = [Prompt("a", 1, {"source": "paper", "n": 1}), Prompt("b", 2, {"source": "mine"})]
    first, second = mix({"mine": given}, shuffle=False).take(2)
    assert first == Prompt("a", 1, {"source": "mine", "row_source": "paper", "n": 1})
    assert second.meta == {"source": "mine"} and given[0].meta["source"] == "paper"


def test_sets_come_in_every_form():
    a, b = numbered(30, "a"), numbered(10, "b")
    assert mix([a, b]).weights == {"a": 0.75, "b": 0.25}  # by their sizes
    assert mix([a, b], [1, 1]).weights == {"a": 0.5, "b": 0.5} == mix({"a": a, "b": b}, {"b": 2, "a": 2}).weights
    assert mix([a, b], {"b": 3, "a": 1}).weights == {"a": 0.25, "b": 0.75}, "by their own names"
    with pytest.raises(DataError, match="weights"):
        mix({"a": a, "b": b}, {"b": 1})
    assert [len(part) for part in mix({"a": a}, on_end="stop").batches(len(a) - 1)] == [len(a) - 1, 1]
    assert mix([(a, 3), (b, 1)]).weights == {"a": 0.75, "b": 0.25} == mix({"a": (a, 3), "b": (b, 1)}).weights
    assert list(mix([["x"], ["y", "z"]], [1, 1]).streams) == ["set0", "set1"]


@given(st.integers(0, 60))
def test_a_state_resumes_exactly_anywhere(before):
    mixture = two(seed=9)
    if before:
        mixture.take(before)
    again = two(seed=9).restore(json.loads(json.dumps(mixture.state())))
    assert again.counts == mixture.counts and again.take(40) == mixture.take(40)


def test_it_stops_when_the_set_in_turn_is_through():
    mixture = mix({"a": (numbered(6), 0.5), "b": (numbered(2), 0.5)}, on_end="stop")
    assert Counter(sources(mixture.take(100))) == {"a": 3, "b": 2}
    assert mixture.ended and mixture.take(1) == []
    twice = mix([numbered(6, "a"), numbered(2, "b")], [1, 1], on_end="stop", epochs=2)
    assert Counter(sources(twice.take(100))) == {"a": 5, "b": 4}
    assert len(mix({"a": numbered(4), "b": numbered(4)}, on_end="stop", epochs=3).take(99)) == 24


def test_a_state_of_another_mixture_is_refused_and_nothing_moves():
    state = two(seed=1)
    state.take(5)
    state = state.state()
    sets = {"gsm": (numbered(7), 0.7), "code": (numbered(3), 0.3)}
    wrong = [
        (mix({**sets, "more": (numbered(2), 1)}, seed=1), "weights="),
        (mix(sets, seed=2), "seed=1"),
        (mix({**sets, "code": (numbered(3), 0.4)}, seed=1), "weights="),
        (mix({**sets, "code": (numbered(4), 0.3)}, seed=1), "of code is of other prompts"),
        (mix({**sets, "gsm": (numbered(7)[::-1], 0.7)}, seed=1), "of gsm is of other prompts"),
        (mix(sets, seed=1, shuffle=False), "shuffle"),
    ]
    for mixture, said in wrong:
        mixture.take(3)
        was = mixture.counts
        with pytest.raises(DataError, match=said):
            mixture.restore(state)
        assert mixture.counts == was
    with pytest.raises(DataError, match="state"):
        two().restore(numbered(3).stream().state())
    with pytest.raises(DataError, match="state"):
        two().restore({"kind": "mixture", "format": 1})


@pytest.mark.parametrize(
    ("sets", "weights", "said"),
    [
        ([], None, "several sets"),
        ({}, None, "several sets"),
        (numbered(3), None, "several sets"),
        ("text", None, "several sets"),
        ([numbered(3), numbered(2)], None, "'numbers'"),
        ([PromptSet((), "a")], None, "'a'"),
        ([numbered(3)], [1, 2], "2 weights"),
        ({"a": (numbered(3), 1), "b": numbered(2)}, None, "weight of 'b' is None"),
        ({"a": (numbered(3), 1)}, [1], "once"),
        ({"a": (numbered(3), 0)}, None, "weight of 'a' is 0"),
        ({"a": (numbered(3), -1.0)}, None, "weight of 'a' is -1.0"),
        ({"a": (numbered(3), float("nan"))}, None, "weight of 'a' is nan"),
        ({"a": numbered(3)}, ["much"], "weight of 'a' is 'much'"),
    ],
)
def test_what_cannot_be_mixed_is_refused(sets, weights, said):
    with pytest.raises(DataError, match=said):
        mix(sets, weights)


def test_its_text_tells_the_shares():
    mixture = two()
    mixture.take(12)
    assert repr(mixture) == "Mixture(gsm 70 % of 7 (epoch 2), code 30 % of 3 (epoch 2) · 12 taken · seed 0)"
