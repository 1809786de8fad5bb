"""The history of a session's steps: a list, a table, and one number over the steps."""

import sys

import numpy as np
import pytest

from rlbench.data.record.history import History
from rlbench.errors import DataError

RECORDS = [
    {
        "step": 1,
        "reward": 0.25,
        "loss": 0.5,
        "loss_name": "grpo",
        "skipped": None,
        "seconds": {"total": 1.5, "check": 0.5},
    },
    {"step": 2, "reward": None, "loss": -0.125, "loss_name": "mine", "seconds": {"total": 2.5}},
    {"step": 3, "reward": float("nan"), "loss": np.float32(2.0), "kl": np.int64(1), "late": True},
]


def test_the_names_of_what_can_be_drawn_are_those_with_a_number_in_some_step():
    assert History(RECORDS).names == ["step", "reward", "loss", "seconds/total", "seconds/check", "kl"]
    assert History([]).names == []


def test_a_part_of_a_record_is_called_by_both_names():
    assert History(RECORDS)["seconds/total"] == [1.5, 2.5, None]
    assert History(RECORDS)["seconds"][0] == {"total": 1.5, "check": 0.5}


def test_values_are_an_array_with_nan_where_a_step_has_no_number():
    values = History(RECORDS).values("reward")
    assert values.dtype == np.float64 and values[0] == 0.25 and np.isnan(values[1:]).all()
    assert History(RECORDS).values("seconds/check").tolist()[0] == 0.5
    assert History([]).values("reward").shape == (0,)


def test_what_is_no_number_is_refused_as_values_naming_the_nearest_that_is():
    with pytest.raises(DataError, match=r"'loss_name' is no number.*nearest: loss"):
        History(RECORDS).values("loss_name")
    with pytest.raises(DataError, match=r"no step has a metric 'second/total'.*nearest: seconds/total"):
        History(RECORDS).values("second/total")


def test_the_table_has_a_row_per_step_and_a_column_per_number():
    table = History(RECORDS).to_pandas()
    assert table.shape == (3, 9) and table["seconds/total"].tolist()[:2] == [1.5, 2.5]
    assert "seconds" not in table.columns and table["loss_name"].tolist()[:2] == ["grpo", "mine"]


def test_without_pandas_the_table_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # as where it is not installed: importing it fails
    with pytest.raises(DataError, match=r"history.to_pandas\(\) needs pandas: pip install pandas"):
        History(RECORDS).to_pandas()


def test_what_is_changed_in_a_record_that_was_lent_stays_in_that_history():
    kept = [{"step": i, "seconds": {"total": float(i)}} for i in range(4)]
    read, again = (History(kept, lent=True) for _ in range(2))
    read[-1]["seconds"]["total"] = 9.0
    for record in read[:2]:
        record["step"] = "mine"
    assert read[-1]["seconds"] == {"total": 9.0} and read[-1] is read[3], "one reader keeps what it changed"
    assert again["step"] == [0, 1, 2, 3] and again[3]["seconds"] == {"total": 3.0}
    assert kept == [{"step": i, "seconds": {"total": float(i)}} for i in range(4)]
    with pytest.raises(IndexError):
        read[4]
