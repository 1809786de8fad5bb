"""Which cause is named for which evidence, where real engines would be slow to bring it about, and in what order."""

import dataclasses

import numpy as np
import pytest

from rlbench.data.prompts.sampling import reshaping
from rlbench.session.checks import diagnosis as causes
from rlbench.session.checks.diagnosis import SideBySide, Weights

SAME = Weights(4, (4, 4), (4,), "float32", "float32")
POSITION = np.tile(np.arange(1, 21), 3)


def sides(gap):
    return SideBySide(np.broadcast_to(gap, POSITION.shape).astype(float), POSITION)


def of_sides(gap, weights=SAME, rounding=1e-4, repeat=0.0):
    return causes.of_sides(weights, sides(gap), 1e-4, rounding, repeat)


def test_sides_that_agree_have_no_cause():
    assert of_sides(1e-6) is None
    assert of_sides(1e-6, dataclasses.replace(SAME, replica_versions=(4, 3))) is None, "numbers alone change nothing"


def test_one_of_several_replicas_that_is_behind_is_named():
    said = of_sides(0.3, dataclasses.replace(SAME, replica_versions=(4, 3)))
    assert said.startswith("the replica holds v3 and the trainer v4")


def test_chance_comes_before_all_else_and_nan_before_that():
    behind = dataclasses.replace(SAME, replica_versions=(3,))
    assert "does not repeat itself" in of_sides(0.3, behind, repeat=0.2)
    assert "not finite" in of_sides(np.nan, behind, repeat=0.2)


def test_rounding_explains_small_differences_alone():
    half = dataclasses.replace(SAME, replica_dtype="bfloat16")
    assert of_sides(0.05, half, rounding=0.25).startswith("rounding:")
    assert "the weights differ" in of_sides(0.5, half, rounding=0.25)


def test_positions_need_a_first_prediction_that_agrees():
    grows = POSITION * 0.01
    assert "the weights differ" in of_sides(grows)
    assert of_sides(np.where(POSITION == 1, 0.0, grows)).startswith("positions:")
    assert "up to position 10, 0.16 beyond" in of_sides(np.where(POSITION == 1, 1e-5, grows + 0.005))


def tokens(gap, special):
    return np.asarray(gap, float), special, "'<end>'"


def test_special_tokens_are_blamed_only_where_they_alone_are_off():
    special = np.arange(20) % 10 == 9
    assert causes.of_tokens(*tokens(np.where(special, -0.4, 1e-6), special), 1e-4).startswith("only special tokens")
    assert causes.of_tokens(*tokens(np.full(20, -0.4), special), 1e-4) is None
    assert causes.of_tokens(*tokens(np.full(20, -0.4), np.ones(20, bool)), 1e-4) is None, "there is nothing but them"
    assert causes.of_tokens(*tokens(np.zeros(20), special), 1e-4) is None


def test_options_that_change_nothing_are_no_suspects():
    neutral = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "max_tokens": 4}
    assert reshaping(neutral) == []
    assert reshaping(neutral | {"top_k": 5, "bad_words": ["x"]}) == ["top_k", "bad_words"]


@pytest.mark.parametrize(
    ("gap", "entropy", "said"),
    [
        (np.full(20, -0.3), 0.5, "a cut distribution"),
        (np.full(20, -0.6), 0.5, "both sides compute the same"),  # more than cutting a tail off can give
        (np.r_[np.full(19, -0.3), 0.3], 0.5, "both sides compute the same"),
        (np.r_[np.full(4, -0.3), np.zeros(16)], 0.5, "both sides compute the same"),  # too few to tell
        (np.where(np.arange(20) % 10 == 0, 2.0, 0.1), 0.5, "the prompt: the first response token is off by 2"),
        (np.where(np.arange(20) % 10 == 0, 2.0, 1.0), 0.5, "both sides compute the same"),
    ],
    ids=["cut", "too much", "not one-sided", "few", "first token", "all tokens"],
)
def test_patterns(gap, entropy, said):
    assert causes.of_pattern(gap, np.arange(len(gap)) % 10, np.full(len(gap), entropy), 1e-4).startswith(said)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def searched(true, known, reshape=lambda logits: logits):
    """The temperature that is found for tokens drawn at `true` and known as of `known`, after how many passes, and the
    squares of what is left at a temperature."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (200, 30))
    drawn = log_softmax(reshape(logits) / true)
    tokens = [rng.choice(30, p=np.exp(row)) for row in drawn]
    sampler, passes = drawn[np.arange(200), tokens], []

    def gaps_at(temperature):
        return (log_softmax(logits / temperature)[np.arange(200), tokens] - sampler).astype(np.float32)

    def gaps(temperature):
        passes.append(temperature)
        return gaps_at(temperature)
        yield

    search = causes.nearest_temperature(gaps, known, gaps_at(known))
    with pytest.raises(StopIteration) as stopped:
        next(search)
    return stopped.value.value, len(passes), lambda temperature: float(np.square(gaps_at(temperature)).sum())


@pytest.mark.parametrize("known", [0.1, 0.7, 1.0, 1.4, 4.0])
def test_the_temperature_of_the_sampler_is_found_from_whichever_is_known(known):
    for true in (0.1, 0.25, 0.7, 0.99, 1.0, 1.4, 2.0, 4.0):
        found, passes, _ = searched(true, known)
        assert float(f"{found:.2g}") == true and passes <= (7 if known == 1.0 else 11), (true, found, passes)


def test_where_no_temperature_explains_the_tokens_the_nearest_is_found():
    def cut(logits):
        return np.where(logits >= np.sort(logits, -1)[:, -3:-2], logits, -1e9)

    for true in (0.5, 1.0, 1.3):
        found, passes, left = searched(true, 1.0, cut)
        grid = np.exp(np.linspace(np.log(causes.COLDEST), np.log(causes.HOTTEST), 2001))
        nearest = grid[np.argmin([left(temperature) for temperature in grid])]
        assert found == pytest.approx(nearest, rel=0.02) and left(found) > 0.01 and passes <= 9, (true, found, nearest)
