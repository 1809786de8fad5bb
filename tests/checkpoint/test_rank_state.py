"""What is plain: what torch reads back without running code, so that all that is kept can be gone back to."""

import io
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch

from rlbench.checkpoint.rank_state import random_state, set_random_state, unplain

PLAIN = {
    "text": "x",
    "bytes": b"x",
    "numbers": (1, 2.5, True, None, 1 + 2j),
    "tensor": torch.ones(2),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([1, 2]),
    "milestones": Counter({3: 1}),
    "ordered": OrderedDict(a=[1]),
    "set": {1, 2},
    (1, "a"): {},
}


def test_what_is_plain_is_read_back():
    assert unplain(PLAIN) is None
    buffer = io.BytesIO()
    torch.save(PLAIN, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True).keys() == PLAIN.keys()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, object()]}, "['a'][1]"),
        ({"a": defaultdict(int)}, "['a']"),
        ({"a": namedtuple("Pair", "x y")(1, 2)}, "['a']"),
        ({"a": type("Mine", (dict,), {})()}, "['a']"),
        ({"a": {frozenset(): 1}}, "['a']"),
        ({"a": lambda: 1}, "['a']"),
    ],
)
def test_what_only_code_could_read_is_named_by_its_place(value, place):
    assert unplain(value) == place


@pytest.mark.parametrize("older", [False, True])
def test_what_is_drawn_after_a_random_state_is_drawn_again_from_it(older):
    def draws():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    before, words = random_state(), random.getstate()
    if older:  # as checkpoints had it
        del before["python_words"]
        before["python"] = words
    kept = io.BytesIO()
    torch.save(before, kept)
    drawn = draws()
    set_random_state(torch.load(io.BytesIO(kept.getvalue()), weights_only=True))
    assert draws() == drawn
