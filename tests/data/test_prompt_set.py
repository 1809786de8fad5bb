"""A set of prompts is a value: every change gives a new set, nothing is lost or doubled on the way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbench.data import Prompt, PromptSet, load
from rlbench.errors import DataError
from tests.data.comparing import labels, numbered


def test_an_integer_gives_a_prompt_and_everything_else_a_set():
    made = numbered(6)
    assert made[-1].label == 5 and made[np.int64(2)].label == 2
    for index, wanted in [(slice(1, 5, 2), [1, 3]), ([4, 0], [4, 0]), (np.arange(6) > 3, [4, 5])]:
        part = made[index]
        assert isinstance(part, PromptSet) and labels(part) == wanted and part.name == "numbers"
    with pytest.raises(IndexError):
        made[6]


def test_filter_and_membership():
    made = numbered(6)
    assert labels(made.filter(lambda p: p.meta["even"])) == [0, 2, 4]
    assert made[3] in made and made.index(made[3]) == 3


@given(st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_a_shuffle_is_an_order_of_the_same_prompts_that_the_seed_fixes(count, seed):
    made = numbered(count)
    once = labels(made.shuffle(seed))
    assert sorted(once) == list(range(count)) and once == labels(made.shuffle(seed))


def test_the_order_of_a_seed_is_the_same_for_ever():
    """A resumed run, under another numpy, must see the order it began with."""
    assert labels(numbered(8).shuffle(0)) == ORDER_OF_SEED_0
    assert labels(numbered(8).shuffle(1)) != ORDER_OF_SEED_0


ORDER_OF_SEED_0 = [3, 7, 0, 1, 2, 4, 6, 5]


@given(st.integers(2, 30), st.floats(0.01, 0.99), st.sampled_from([None, 0, 5]))
def test_a_split_shares_out_every_prompt_once(count, share, seed):
    first, second = numbered(count).split(share, seed)
    assert sorted(labels(first) + labels(second)) == list(range(count)) and len(first) and len(second)
    assert abs(len(first) - share * count) <= 1
    if seed is None:
        assert labels(first) == list(range(len(first)))


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5])
def test_a_share_outside_of_the_set_is_refused(share):
    with pytest.raises(DataError, match="between 0 and 1"):
        numbered(4).split(share)


def test_a_single_prompt_cannot_be_split():
    with pytest.raises(DataError, match="two prompts"):
        numbered(1).split(0.5)


def test_the_fingerprint_is_of_prompts_and_labels_in_their_order():
    made = numbered(4)
    assert made.fingerprint == numbered(4, "other name").fingerprint
    others = [made[:3], made[::-1], PromptSet((*made[:3], Prompt("p3", 4))), PromptSet((*made[:3], Prompt([3], 3)))]
    assert len({made.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_lengths_of_another_number_are_refused():
    with pytest.raises(DataError, match=r"lengths have shape \(3,\) for 4 prompts"):
        PromptSet(numbered(4).prompts, lengths=np.zeros(3, int))


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: numbered(3), "PromptSet('numbers': 3 prompts)"),
        (lambda: load(["a", "b"]), "PromptSet(2 prompts · 0 with a label)"),
        (lambda: load([Prompt("a", 1), "b"]), "PromptSet(2 prompts · 1 with a label)"),
        (
            lambda: load([[1], [1, 2], [1, 2, 3]], max_prompt_tokens=2, on_long="keep", label=None),
            "PromptSet(3 prompts · 0 with a label · 1 to 3 tokens, median 2 · 1 too long for 2 tokens: .too_long)",
        ),
        (lambda: numbered(0), "PromptSet('numbers': 0 prompts)"),
    ],
)
def test_its_text_tells_what_is_in_it(made, text):
    assert repr(made()) == text
