"""The experts that tokens took stay beside them: through parts, choices, joins, files and batches."""

from dataclasses import replace

import numpy as np
import pytest

from rlbench.data import Prompt, Ragged, Rollouts, TrainBatch, join
from rlbench.data.base.routing import UNKNOWN, check_family, routing_rows
from rlbench.errors import BuildError, DataError
from tests.data.comparing import batch, centred, experts_of, full
from tests.data.values import generated, rollouts


def test_rows_end_unknown_and_none_is_made_of_nothing():
    own = np.ones((2, 3, 2), np.uint8)
    rows = routing_rows([own, None], [3, 2])
    assert rows.values.dtype == np.int16 and rows.values.shape == (5, 3, 2)
    assert rows[0][:, 0, 0].tolist() == [1, 1, UNKNOWN] and (rows[1] == UNKNOWN).all()
    assert routing_rows([None, None], [3, 2]) is None


def test_parts_of_replicas_come_together_in_prompt_order():
    first = generated([(1, 0, [7, 8], "stop"), (0, 1, [9], "stop")])
    second = generated([(0, 0, [1, 2, 3], "stop")])
    routing = experts_of([4, 2]), experts_of([4])
    parts = [replace(part, routing=own) for part, own in zip((first, second), routing, strict=True)]
    whole = Rollouts.merge([Prompt("a"), Prompt("b")], parts, {})
    wanted = [routing[1][0], routing[0][1], routing[0][0]]
    assert all(np.array_equal(a, b) for a, b in zip(whole.routing, wanted, strict=True))
    half = Rollouts.merge([Prompt("a"), Prompt("b")], [parts[0], second], {})
    assert (half.routing[0] == UNKNOWN).all() and np.array_equal(half.routing[1], wanted[1])


def test_chosen_completions_and_rows_of_a_batch_keep_theirs():
    made = full()
    chosen = made.select([4, 1])
    assert np.array_equal(chosen.routing[0], made.routing[4]) and np.array_equal(made[2:].routing[1], made.routing[5])
    whole = made.batch(centred)
    assert np.array_equal(whole.routing.values, made.routing.values)
    assert np.array_equal(whole[[3, 0]].routing[0], made.routing[3])
    assert np.array_equal((whole + whole[1:2]).routing[6], made.routing[1])
    assert (join(whole, batch()).routing[6] == UNKNOWN).all() and join(batch(), batch()).routing is None


def test_a_file_brings_them_back(tmp_path):
    made = full()
    again = Rollouts.from_parquet(made.to_parquet(tmp_path / "r.parquet"))
    assert again.routing.values.shape == made.routing.values.shape and again.routing.values.dtype == np.int16
    assert np.array_equal(again.routing.values, made.routing.values)
    read = TrainBatch.from_parquet(made.batch(centred).to_parquet(tmp_path / "b.parquet"))
    assert np.array_equal(read.routing.values, made.routing.values)
    assert Rollouts.from_parquet(rollouts().to_parquet(tmp_path / "n.parquet")).routing is None


def test_rows_of_other_lengths_and_other_models_are_refused():
    made = batch()
    with pytest.raises(DataError, match="not as long as the sequences"):
        made.replace(routing=Ragged(np.zeros((made.tokens, 1, 1), np.int16), made.responses.offsets))
    other = replace(full(), routing=experts_of(full().routing.lengths, layers=4))
    with pytest.raises(DataError, match="other layers"):
        join(full(), other)


def test_a_family_whose_routers_take_no_experts_is_named():
    with pytest.raises(BuildError, match=r"router_replay=True: 'some/folder' is a 'qwen2' model.*qwen3_moe"):
        check_family("router_replay", "some/folder", "qwen2")
