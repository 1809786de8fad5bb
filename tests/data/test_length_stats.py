"""The lengths of a rollout in a few numbers: those that numpy gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbench.data.rollouts.merging import histogram_edges, length_stats
from tests.data.values import rollouts


def test_they_are_numpys():
    value = rollouts()
    told = length_stats(value)
    lengths = value.lengths
    assert [told["p50"], told["p90"], told["p99"]] == np.percentile(lengths, [50, 90, 99]).tolist()
    assert told["counts"] == np.histogram(lengths, told["edges"])[0].tolist()
    assert (told["samples"], told["max"], told["aborted"]) == (6, lengths.max(), 0)
    assert told["truncated"] == pytest.approx(value.truncated.mean()) and told["truncated"] > 0


def test_a_rollout_that_was_stopped_before_its_first_token_has_no_percentiles():
    told = length_stats(rollouts().select(np.zeros(6, bool)))
    assert told["samples"] == told["aborted"] == sum(told["counts"]) == 0
    assert {told[name] for name in ("version", "truncated", "p50", "p90", "p99", "max")} == {None}


@given(st.integers(0, 200_000))
def test_bins_are_few_whole_and_hold_every_length(longest):
    edges = histogram_edges(longest)
    assert edges[0] == 0 and edges[-1] > longest and 2 <= len(edges) <= 25
    assert len(set(np.diff(edges))) == 1 and edges.dtype == np.int64
    assert np.histogram([longest], edges)[0].sum() == 1
