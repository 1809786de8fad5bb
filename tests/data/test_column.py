"""Columns: an array in every computation, and one that knows what it is when a person looks."""

import copy
import pickle

import numpy as np
import pytest

from rlbench.data import Rollouts
from rlbench.data.base.column import Column
from tests.data.values import rollouts

VALUES = np.array([4.0, 1.0, 3.0, 2.0])

COMPUTED = {
    "comparison": lambda c: c > 2,
    "arithmetic": lambda c: (c - c.mean()) / c.std(),
    "from the right": lambda c: 2.0 - c,
    "power": lambda c: c**2,
    "sum": lambda c: c.sum(),
    "mean over an axis": lambda c: c.reshape(2, 2).mean(axis=0),
    "cumsum": lambda c: c.cumsum(),
    "np.diff": np.diff,
    "np.exp": np.exp,
    "np.maximum.accumulate": np.maximum.accumulate,
    "np.where": lambda c: np.where(c > 2, c, 0),
    "np.bincount": lambda c: np.bincount(c.astype(int), c),
    "np.percentile": lambda c: np.percentile(c, [10, 90]),
    "np.histogram": lambda c: np.histogram(c, 2)[0],
    "outer": lambda c: np.multiply.outer(c, c),
    "into another array": lambda c: np.add(c, 1, out=np.zeros(4)),
    "where=": lambda c: np.add.reduce(c, where=c > 2),
    "asarray": np.asarray,
    "tolist": lambda c: np.array(c.tolist()),
}


def column():
    return Column.of(VALUES.copy(), "lengths", "tokens", np.array([True, False, False, False]))


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_what_is_computed_is_a_plain_array_with_the_same_numbers(compute):
    got, wanted = compute(column()), compute(VALUES)
    assert type(got) is type(wanted) and np.array_equal(got, wanted)
    assert np.asarray(got).dtype == np.asarray(wanted).dtype


@pytest.mark.parametrize(
    "choose",
    [lambda c: c[1:], lambda c: c[c > 1], lambda c: c[[3, 0]], np.sort, np.copy, copy.copy, copy.deepcopy],
    ids=["slice", "mask", "rows", "np.sort", "np.copy", "copy", "deepcopy"],
)
def test_a_choice_of_its_values_is_still_the_same_kind_of_thing(choose):
    got = choose(column())
    assert np.array_equal(got, choose(VALUES))
    if isinstance(got, Column):
        assert (got.name, got.unit, got.truncated) == ("lengths", "tokens", None)
    else:
        assert choose is np.copy


def test_a_single_value_is_a_number():
    assert type(column()[0]) is np.float64 and column().max() == 4.0


def test_values_are_shared_with_what_it_was_made_of_and_can_be_changed_in_place():
    values = VALUES.copy()
    made = Column.of(values, "rewards")
    made += 1
    made[0] = 9
    assert values.tolist() == [9, 2, 4, 3] and made.name == "rewards"


def test_torch_takes_it_for_an_array_either_way():
    torch = pytest.importorskip("torch")
    assert torch.as_tensor(column()).tolist() == VALUES.tolist()
    assert isinstance(torch.ones(4) * torch.from_numpy(column()), torch.Tensor)


@pytest.mark.parametrize("protocol", [2, 5])
def test_it_survives_pickling_whole(protocol):
    other = pickle.loads(pickle.dumps(column(), protocol))
    assert type(other) is Column and (other.name, other.unit) == ("lengths", "tokens")
    assert other.tolist() == VALUES.tolist() and other.truncated.tolist() == [True, False, False, False]


def test_large_columns_are_pickled_without_a_copy():
    buffers = []
    pickle.dumps(Column.of(np.zeros(1000), "rewards"), 5, buffer_callback=buffers.append)
    assert [b.raw().nbytes for b in buffers] == [8000]


def test_its_text_says_what_it_is_and_what_is_in_it():
    text = repr(column())
    assert text.splitlines() == [
        "lengths: 4 values, tokens · mean 2.5 · std 1.12 · min 1 · p10 1.3 · p50 2.5 · p90 3.7 · max 4"
        " · 25 % truncated",
        "array([4., 1., 3., 2.])",
    ]
    assert "truncated" not in repr(column()[1:]) and repr(column()[1:]).startswith("lengths: 3 values")
    assert str(column()) == str(VALUES) and f"{column().mean():.1f}" == "2.5"
    assert repr(column().reshape(2, 2)) == repr(VALUES.reshape(2, 2))
    assert repr(Column.of(np.zeros(0), "rewards")) == "rewards: no values yet\narray([], dtype=float64)"


def test_its_summary_is_the_numbers_by_name():
    found = column().summary()
    assert found == pytest.approx(
        {
            "count": 4,
            "mean": 2.5,
            "std": np.sqrt(1.25),
            "min": 1,
            "p10": 1.3,
            "p50": 2.5,
            "p90": 3.7,
            "max": 4,
            "truncated": 0.25,
        }
    )
    assert Column.of([], "rewards").summary() == {"count": 0}


# -- of rollouts


def test_lengths_and_rewards_of_rollouts_are_columns():
    value = rollouts().score(range(6))
    assert type(value.lengths) is Column and value.lengths.tolist() == [1, 2, 3, 4, 5, 6]
    assert value.lengths.summary()["truncated"] == pytest.approx(1 / 6)
    assert type(value.rewards) is Column and value.rewards.unit == "" and value.rewards.name == "rewards"
    assert rollouts().rewards is None


def test_what_is_taken_from_rollouts_has_columns_of_its_own():
    part = rollouts().score(range(6)).select(lambda r: r.finish_reason == "length")
    assert part.rewards.tolist() == [5] and part.lengths.summary()["truncated"] == 1.0
    again = pickle.loads(pickle.dumps(part))
    assert isinstance(again, Rollouts) and type(again.rewards) is Column and again.rewards.tolist() == [5]


def test_a_batch_holds_plain_arrays_which_ranks_read_from_shared_memory():
    batch = rollouts().score(range(6)).batch(lambda rewards, group: rewards)
    assert type(batch.rewards) is np.ndarray and type(batch.lengths) is np.ndarray
