"""NeedParallel: what is split, how evenly, and what is refused."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rlbench.engines.parallel import NeedParallel, estimated_bytes, row_spans, split_call
from rlbench.errors import DataError
from rlbench.weights.manifest import Layout, Manifest


@dataclass
class Asked:
    rows: Any


def rows_of(split, i=0):
    return [args[i] for args, _ in split[0]]


def test_rows_are_split_in_order_with_the_remainder_to_the_first_ranks():
    assert rows_of(split_call((NeedParallel([0, 1, 2, 3, 4]),), {}, 4)) == [[0, 1], [2], [3], [4]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rows", [8, 13, 40])
def test_every_row_goes_to_exactly_one_rank(rows, ranks):
    parts = rows_of(split_call((NeedParallel(list(range(rows))),), {}, ranks))
    assert [row for part in parts for row in part] == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_tensors_and_arrays_are_split_along_their_first_dimension():
    parts = rows_of(split_call((NeedParallel(torch.arange(10).view(5, 2)),), {}, 4))
    assert [tuple(p.shape) for p in parts] == [(2, 2), (1, 2), (1, 2), (1, 2)]
    assert rows_of(split_call((NeedParallel(np.arange(4)),), {}, 2))[1].tolist() == [2, 3]


def test_several_marked_arguments_are_split_alike_and_others_copied():
    calls, tokens = split_call((NeedParallel(list("abcd")), 7), {"y": NeedParallel((1, 2, 3, 4))}, 2)
    assert tokens is None and calls == [((["a", "b"], 7), {"y": (1, 2)}), ((["c", "d"], 7), {"y": (3, 4)})]


def test_marked_arguments_of_different_lengths_are_refused():
    with pytest.raises(DataError, match="same number of rows"):
        split_call((NeedParallel([1, 2]), NeedParallel([1, 2, 3])), {}, 2)


def test_fewer_rows_than_ranks_are_repeated_where_every_row_weighs_the_same():
    assert rows_of(split_call((NeedParallel(["x"]),), {}, 4)) == [["x"]] * 4
    assert rows_of(split_call((NeedParallel(["x", "y"]),), {}, 4)) == [["x"], ["x"], ["y"], ["y"]]


def test_fewer_rows_than_ranks_are_refused_where_repeating_would_skew_the_weights():
    with pytest.raises(DataError, match="3 rows for 4 ranks"):
        row_spans(3, 4)


def test_no_rows_are_refused():
    with pytest.raises(DataError, match="no rows"):
        split_call((NeedParallel([]),), {}, 2)


def test_ranks_that_compute_layers_together_get_the_same_rows():
    assert rows_of(split_call((NeedParallel([1, 2]),), {}, 4, together=2)) == [[1], [1], [2], [2]]


@pytest.mark.parametrize("alias", ["dp", "data parallel", "data_parallel", "data-parallel"])
def test_names_of_data_parallel(alias):
    assert len(NeedParallel([1, 2], type=alias)) == 2


@pytest.mark.parametrize("rows", [[[1, 2, 3, 4], [5, 6, 7, 8]], np.arange(1, 9).reshape(2, 4)])
def test_tokens_are_split_over_a_group_and_rows_over_the_groups(rows):
    calls, tokens = split_call((NeedParallel(rows, type="seq"), NeedParallel(["a", "b"])), {}, 4, 2)
    assert tokens == 4
    assert [np.asarray(args[0]).tolist() for args, _ in calls] == [[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]]
    assert [args[1] for args, _ in calls] == [["a"], ["a"], ["b"], ["b"]]


@pytest.mark.parametrize(
    ("rows", "size", "said"),
    [
        ([[1, 2]], 1, "sequence_parallel=2"),
        ([[1, 2, 3]], 2, "share evenly"),
        ([[1, 2], [1, 2, 3, 4]], 2, "pad to one length"),
    ],
)
def test_tokens_that_cannot_be_split_are_refused(rows, size, said):
    with pytest.raises(DataError, match=said):
        split_call((NeedParallel(rows, type="seq"),), {}, 2, size)


def test_a_way_to_split_that_does_not_exist_is_refused():
    with pytest.raises(DataError, match="wanted"):
        NeedParallel([[1, 2]], type="expert")


@pytest.mark.parametrize("data", ["text", {"a": [1]}, 3, None])
def test_what_has_no_rows_is_refused(data):
    with pytest.raises(DataError, match="wants rows"):
        NeedParallel(data)


def test_the_size_estimate_sees_through_containers():
    big = np.zeros(1 << 20, np.float32)
    assert estimated_bytes([NeedParallel(big)]) >= big.nbytes
    assert estimated_bytes({"k": torch.zeros(1 << 18)}) >= 1 << 20
    assert estimated_bytes([[1] * 1000] * 1000) > 4 << 20
    assert estimated_bytes([1, "a", None, Asked]) < 1000
    assert estimated_bytes(Asked(big)) >= big.nbytes
    lies = Layout(1 << 40, [("w", torch.empty(1 << 30, device="meta"))]).buckets
    assert estimated_bytes(Manifest("shm", lies)) < 1000
