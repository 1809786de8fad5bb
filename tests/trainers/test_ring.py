"""Ring attention by itself, without ranks: which tiles a slice computes, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.strategies.ranks.sequence import ALONE, SequenceGroup
from rlbench.trainers.passes import ring
from rlbench.trainers.passes.ring import Layout, Ring, Tile, ring_attention


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "QUERIES", 4)
        patch.setattr(ring, "KEYS", 3)
        yield


def seen_by_hand(lengths: list[int], window: int | None) -> torch.Tensor:
    """Mask (tokens, tokens) of the whole row."""
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    distance = torch.arange(len(sequence))[:, None] - torch.arange(len(sequence))
    seen = (sequence[:, None] == sequence) & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def group_of(index: int, count: int) -> SequenceGroup:
    group = SequenceGroup()
    group.index, group.size = index, count
    return group


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 13), min_size=1, max_size=8), st.sampled_from([1, 2, 3, 5]), st.none() | st.integers(1, 9)
)
def test_tiles_hold_each_key_that_a_token_sees_once_and_nothing_of_slices_that_nobody_sees(
    lengths: list[int], count: int, window: int | None
) -> None:
    if rest := -sum(lengths) % count:
        lengths = [*lengths, rest]
    size, expected = sum(lengths) // count, seen_by_hand(lengths, window)
    layout = Layout(tuple(lengths), size, count, window)
    found = torch.zeros_like(expected, dtype=torch.int64)
    for index in range(count):
        way = Ring(layout, group_of(index, count), 1.0, None, 0.0, 0)
        rows = found[index * size : (index + 1) * size]
        for back in range(index + 1):
            columns = rows[:, (index - back) * size : (index - back + 1) * size]
            strips = list(layout.strips(index, back))
            assert bool(strips) == layout.sees(index, back)
            for queries, tiles in strips:
                for tile in tiles:
                    hidden = way.hidden(queries, tile, back, torch.device("cpu"))
                    assert tile.masked == bool(hidden.any()) and not hidden.all()
                    columns[queries, tile.keys] += ~hidden
        assert not layout.sees(index, index + 1)
    assert torch.equal(found, expected.long())


@pytest.mark.parametrize(
    "options",
    [
        {"scaling": 0.7, "dropout": 0.4},
        {"sliding_window": 3, "softcap": 1.5},
        {"sliding_window": 5, "softcap": 0.8, "s_aux": True, "dropout": 0.2},
    ],
    ids=lambda options: " ".join(options),
)
def test_its_gradients_are_those_of_what_it_computes(options: dict[str, Any]) -> None:
    lengths, generator = [5, 1, 2], torch.Generator().manual_seed(3)
    shapes = [(1, 4, 8, 2), (1, 2, 8, 2), (1, 2, 8, 3)]
    given = [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]
    if options.get("s_aux"):
        given.append(torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True))

    def attended(query: Any, key: Any, value: Any, sinks: Any = None) -> torch.Tensor:
        torch.manual_seed(5)  # the same tokens are dropped each time
        return ring_attention(query, key, value, lengths, ALONE, **{**options, "s_aux": sinks})

    assert torch.autograd.gradcheck(attended, given)


def test_dropout_drops_its_share_alike_in_both_passes_and_otherwise_in_each_tile() -> None:
    layout = Layout((400,), 400, 1)
    way = Ring(layout, ALONE, 1.0, None, 0.25, 11)
    shares = torch.zeros(1, 1, 1, 100, 100)
    first, again, other = (
        way.kept(slice(0, 100), Tile(slice(start, start + 100), True), 0, shares) for start in (0, 0, 100)
    )
    assert first is not None and other is not None
    assert torch.equal(first, again) and not torch.equal(first, other)  # type: ignore[arg-type]
    assert first.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(first.mean()) == pytest.approx(1.0, abs=0.05)


def test_scores_that_float32_cannot_take_the_exponential_of_are_merged_all_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 1, 10, 4, generator=generator) for _ in range(3))
    out = ring_attention(300 * query, key, value, [10], ALONE, scaling=1.0)
    exact = torch.nn.functional.scaled_dot_product_attention(300 * query, key, value, is_causal=True, scale=1.0)
    torch.testing.assert_close(out, exact.transpose(1, 2))
