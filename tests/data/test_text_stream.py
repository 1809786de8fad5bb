"""A cursor over texts: each once an epoch, pairs and judged responses whole, the same place in another process."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.data.batches.pairing import check_pairs
from rlbench.errors import DataError
from rlbench.tiny.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(256)


def rows(count: int) -> list[dict[str, Any]]:
    numbers = [{"prompt": f"sort {i + 10}", "completion": str(i + 10)} for i in range(count)]
    return [{**row, "chosen": row["completion"], "rejected": "0", "label": i % 2 == 0} for i, row in enumerate(numbers)]


def asked(batch: Any) -> list[bytes]:
    return [prompt.tobytes() for prompt in batch.prompts]


def test_each_text_comes_once_an_epoch_in_an_order_of_its_own(tokenizer: Any) -> None:
    texts = rb.data.demonstrations(rows(7), tokenizer)
    stream = texts.stream(seed=3)
    epochs = [asked(stream.take(7)) for _ in range(2)]
    assert all(sorted(epoch) == sorted(asked(texts)) for epoch in epochs) and epochs[0] != epochs[1]
    assert asked(texts.stream(seed=3).take(14)) == [*epochs[0], *epochs[1]], "over the end of an epoch"
    assert asked(texts.stream(shuffle=False).take(7)) == asked(texts)
    assert [len(batch) for batch in texts.stream(epochs=1).batches(3)] == [3, 3, 1]
    assert (len(stream), stream.epoch, stream.position, stream.taken) == (7, 2, 0, 14)


def test_pairs_stay_whole_also_where_one_comes_twice(tokenizer: Any) -> None:
    pairs = rb.data.pairs(rows(5), tokenizer)
    stream = pairs.stream()
    assert len(stream) == 5
    for batch in itertools.islice(stream.batches(4), 10):
        check_pairs(batch)
        assert len(batch) == 8 and (batch.preference[::2] == 1).all()
    check_pairs(stream.take(12))
    apart = pairs.rows([0, 2, 4, 6, 8, 1, 3, 5, 7, 9]).stream(seed=1).take(3)
    check_pairs(apart)
    assert apart.preference.tolist() == [1, -1] * 3 and asked(apart)[::2] == asked(apart)[1::2]


def test_a_judged_response_keeps_what_its_reference_point_is_measured_on(tokenizer: Any) -> None:
    batch = rb.data.labelled(rows(6), tokenizer)
    taken = batch.stream(seed=1).take(4)
    assert len(batch.stream()) == 6 and len(taken) == 8
    assert (taken.preference[1::2] == 0).all() and (taken.preference[::2] != 0).all()


def test_it_goes_on_from_its_state_and_from_no_other(tokenizer: Any) -> None:
    texts = rb.data.demonstrations(rows(7), tokenizer)
    stream = texts.stream(seed=2)
    stream.take(5)
    state = json.loads(json.dumps(stream.state()))
    assert asked(texts.stream(seed=2).restore(state).take(4)) == asked(stream.take(4))
    other = texts.replace(mask=np.zeros_like(texts.mask))
    for wrong in (texts.stream(seed=3), texts[:5].stream(seed=2), other.stream(seed=2)):
        with pytest.raises(DataError, match=r"seed|other texts"):
            wrong.restore(state)
    with pytest.raises(DataError, match="whole number"):
        stream.take(0)
    assert "TextStream(epoch 1, " in repr(texts.stream()) and "of 7 texts" in repr(stream)
