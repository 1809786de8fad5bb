"""What a pass keeps of each token comes back by row, and travels flat however many rows there are."""

from __future__ import annotations

import pickle

import numpy as np
import torch

from rlbench.data import Ragged
from rlbench.data.base.ragged import rows_in_order
from rlbench.trainers.passes.token_keeper import TokenKeeper
from tests.modules import batch_of


def kept(parts: list[tuple[list[int], list[int]]], **scales: float) -> TokenKeeper:
    """A keeper of micro-batches of (rows, response lengths); each value is its row's number times the scale."""
    keeper = TokenKeeper(*scales)
    for rows, lengths in parts:
        values = torch.from_numpy(np.repeat(np.asarray(rows, np.float32), lengths))
        part = batch_of([(2, length) for length in lengths])
        keeper.add(np.asarray(rows), part, {name: values * scale for name, scale in scales.items()})
    return keeper


def test_rows_of_several_ranks_are_put_in_the_batchs_order_each_once() -> None:
    ranks = [kept([([3, 0], [2, 1])], a=1.0, b=2.0), kept([([2], [3]), ([1, 3], [1, 2])], a=1.0, b=2.0)]
    ranks[1].scale(1.0)
    joined = rows_in_order([rank.result() for rank in ranks])
    assert joined["a"].lengths.tolist() == [1, 1, 3, 2]
    assert joined["a"].values.tolist() == [0, 1, 2, 2, 2, 3, 3] and joined["a"].values.dtype == np.float32
    assert joined["b"].values.tolist() == [0, 2, 4, 4, 4, 6, 6]


def test_a_channel_that_one_micro_batch_lacks_is_left_out_and_a_rank_without_rows_says_nothing() -> None:
    keeper = kept([([0], [2])], a=1.0, b=1.0)
    keeper.add(np.array([1]), batch_of([(2, 1)]), {"a": torch.ones(1)})
    nothing = TokenKeeper("a", "b").result()
    assert len(nothing["rows"]) == 0 and isinstance(nothing["channels"]["a"], Ragged)
    assert list(rows_in_order([nothing, keeper.result()])) == ["a"]


def test_a_thousand_rows_travel_in_as_many_pieces_as_two() -> None:
    pieces = []
    for count in (2, 1000):
        buffers: list[pickle.PickleBuffer] = []
        result = kept([(list(range(count)), [1 + i % 3 for i in range(count)])], a=1.0, b=1.0).result()
        pickle.dumps(result, protocol=5, buffer_callback=buffers.append)
        pieces.append(len(buffers))
    assert pieces[0] == pieces[1]
