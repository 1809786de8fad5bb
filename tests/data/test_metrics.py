"""What a step says of itself: metrics to read, and the history of a session's steps."""

import copy
import pickle

import numpy as np
import pytest

from rlbench.data.record.history import History
from rlbench.data.record.metrics import Metrics
from rlbench.errors import DataError
from rlbench.units import format_number

RECORDS = [{"step": 1, "reward": 0.25, "loss": 0.5}, {"step": 2, "reward": 0.5, "loss": -0.125, "kl": 0.01}]


def test_metrics_are_read_by_name_and_as_attributes():
    metrics = Metrics({"loss": 0.5, "step": 3}, {"entropy": np.zeros(2)})
    assert metrics["loss"] == metrics.loss == 0.5 and set(metrics) == {"loss", "step"} and len(metrics) == 2
    assert "loss" in dir(metrics) and metrics.tokens["entropy"].shape == (2,) and "tokens" not in metrics
    assert dict(metrics) == {"loss": 0.5, "step": 3}


def test_an_unknown_metric_names_those_there_are():
    with pytest.raises(AttributeError, match="no metric 'los'; nearest: loss; there are loss"):
        _ = Metrics({"loss": 1.0}).los


def test_metrics_survive_pickling_and_copying():
    metrics = Metrics({"loss": 1.0}, {"entropy": np.ones(1)})
    for other in (pickle.loads(pickle.dumps(metrics)), copy.copy(metrics), copy.deepcopy(metrics)):
        assert other.loss == 1.0 and other.tokens["entropy"].tolist() == [1.0]


def test_the_text_of_metrics_shows_three_digits_and_leaves_out_what_is_not_there():
    text = repr(Metrics({"step": 4, "loss": 0.123456, "kl": None, "reward": 0.5, "tokens_per_s": 12345.6}))
    assert text == "step 4: loss 0.123 · reward 0.5 · tokens_per_s 12,346"


def test_a_skipped_step_says_why():
    assert "step skipped: gradient not finite" in repr(Metrics({"step": 1, "skipped": "gradient not finite"}))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00012345, "0.000123"),
        (1234567, "1,234,567"),
        (np.int64(7), "7"),
        (np.float32(2.5), "2.5"),
        (1234.5, "1,234"),
        (True, "True"),
        ("abc", "abc"),
        (float("nan"), "nan"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers_for_a_reader(value, text):
    assert format_number(value) == text


def test_a_metric_over_the_steps_by_name_with_none_where_a_step_lacks_it():
    history = History(RECORDS)
    assert history["reward"] == [0.25, 0.5] and history["kl"] == [None, 0.01]
    assert history[-1]["step"] == 2 and len(history) == 2 and [r["step"] for r in history] == [1, 2]


def test_a_metric_no_step_has_is_refused_with_the_nearest():
    with pytest.raises(DataError, match=r"'rewrad'.*nearest: reward"):
        History(RECORDS)["rewrad"]
    assert History([])["reward"] == []


def test_a_slice_of_a_history_is_one():
    part = History(RECORDS)[1:]
    assert isinstance(part, History) and part["step"] == [2]


def test_a_history_is_a_table_for_pandas():
    table = History(RECORDS).to_pandas()
    assert table["reward"].tolist() == [0.25, 0.5] and list(table.columns) == ["step", "reward", "loss", "kl"]


def test_the_text_of_a_history_shows_the_last_step():
    assert repr(History(RECORDS)) == "History(2 steps; last: reward 0.5, loss -0.125, kl 0.01)"
    assert repr(History([])) == "History(no steps yet)"


def test_a_history_does_not_share_its_list_with_the_caller():
    records = list(RECORDS)
    history = History(records)
    records.clear()
    assert len(history) == 2
