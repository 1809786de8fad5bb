"""Rows of different lengths in one flat array behave like the list of rows they stand for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbench.data import Ragged
from rlbench.errors import DataError

ROWS = st.lists(st.lists(st.integers(-1000, 1000), max_size=5), max_size=6)


def as_lists(ragged):
    return [row.tolist() for row in ragged]


@given(ROWS)
def test_rows_come_back_as_they_went_in(rows):
    ragged = Ragged.from_rows(rows, np.int32)
    assert as_lists(ragged) == rows and len(ragged) == len(rows)
    assert ragged.values.dtype == np.int32 and ragged.offsets.dtype == np.int64
    assert ragged.lengths.tolist() == [len(row) for row in rows]


@given(ROWS.filter(bool), st.data())
def test_take_gives_the_rows_asked_for_in_that_order_also_twice(rows, data):
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    assert as_lists(Ragged.from_rows(rows, np.int32).take(chosen)) == [rows[i] for i in chosen]


def test_a_row_is_found_from_either_end_and_beyond_them_is_an_index_error():
    ragged = Ragged.from_rows([[1, 2], [], [3]], np.int32)
    assert ragged[-1].tolist() == [3] and ragged[1].tolist() == []
    for row in (3, -4):
        with pytest.raises(IndexError, match=f"row {row} of 3"):
            ragged[row]


def test_other_values_on_the_same_rows():
    ragged = Ragged.from_rows([[1, 2], [3]], np.int32).with_values(np.array([0.5, 0.25, 0.125]))
    assert as_lists(ragged) == [[0.5, 0.25], [0.125]]


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [], [[0, 3]]])
def test_offsets_that_do_not_cover_the_values_are_refused(offsets):
    with pytest.raises(DataError, match="do not cover 3 values"):
        Ragged(np.zeros(3), np.array(offsets, np.int64))


def test_a_row_is_a_view_not_a_copy():
    ragged = Ragged.from_rows([[1, 2], [3]], np.int32)
    assert np.shares_memory(ragged[0], ragged.values)
