"""Prompts at hand, shown: what is in a set, what was too long, where a stream stands; hostile rows stay text."""

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from rlbench import notebook
from rlbench.data import Prompt, PromptSet, load, mix
from rlbench.data.prompts.lengths import LongPrompt
from rlbench.notebook.cards.data_views import mixture_card, prompt_set_card, stream_card
from tests.notebook.reading import HOSTILE, both, inert, read


def hostile():
    long = (LongPrompt(HOSTILE, 3, 99, HOSTILE),)
    return PromptSet((Prompt(HOSTILE, HOSTILE),), HOSTILE, np.array([4]), 5, long)


def counted(count=7):
    return load([[1] * (i + 1) for i in range(count)], max_prompt_tokens=5, on_long="keep", name="sums")


def test_a_set_shows_its_first_prompts_its_lengths_and_what_was_too_long():
    text = both(prompt_set_card(counted()))
    for wanted in (
        "sums",
        "7 prompts",
        "min 1, p50 4, p90 6, max 7",
        "[1, 1, 1]",
        "… 2 more",
        "longer than 5 tokens",
        "2 too long: .too_long lists them all",
    ):
        assert wanted in text, wanted
    assert "tokens" not in both(prompt_set_card(load(["a"]))) and "too long" not in both(prompt_set_card(counted(3)))
    assert "0 prompts" in both(prompt_set_card(PromptSet(())))


def test_a_long_prompt_is_one_line_that_ends_in_dots():
    text = prompt_set_card(load([Prompt("word\n" * 500, "l" * 500)])).text()
    assert all(len(line) < 220 for line in text.splitlines()) and text.count("…") == 2


def test_a_stream_and_a_mixture_show_where_they_stand():
    stream = counted().stream(seed=3, on_end="stop", epochs=2)
    stream.take(9)
    assert "epoch 2 of 2, 2 of 7" in both(stream_card(stream)) and "9 taken" in both(stream_card(stream))
    stream.take(99)
    assert "ended" in both(stream_card(stream))
    mixture = mix({"a": (counted(4), 3), "b": (counted(3), 1)}, seed=2)
    assert "–" in both(mixture_card(mixture))
    mixture.take(10)
    text = both(mixture_card(mixture))
    taken = f"{10 * mixture.counts['a']} % {mixture.counts['a']} epoch"
    for wanted in ("a 75 % " + taken, "b 25 %", "10 taken", "of 4", "of 3"):
        assert wanted in text, wanted


@pytest.mark.parametrize(
    "card",
    [
        lambda: prompt_set_card(hostile()),
        lambda: stream_card(hostile().stream()),
        lambda: mixture_card(mix({HOSTILE: hostile()})),
    ],
    ids=["set", "stream", "mixture"],
)
def test_hostile_text_is_shown_as_text(card):
    reader = read(card().html())
    inert(reader)
    assert HOSTILE[:20] in reader.text


@pytest.mark.parametrize(
    ("make", "card"),
    [
        (counted, prompt_set_card),
        (lambda: counted().stream(), stream_card),
        (lambda: mix({"a": counted()}), mixture_card),
    ],
    ids=["set", "stream", "mixture"],
)
def test_at_the_end_of_a_cell_they_show_their_card(make, card):
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    try:
        notebook.install()
        assert shell.display_formatter.format(make())[0] == card(make()).bundle()
        assert shell.display_formatter.format([make()])[0]["text/plain"] == f"[{make()!r}]"
    finally:
        InteractiveShell.clear_instance()
