"""Differences of tensors: what comes out is to the bit what went in, in the fewest bytes, and nonsense is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.errors import WeightSyncError
from rlbench.weights.delta import (
    GAPS,
    MASK,
    WHOLE,
    Change,
    Copies,
    Words,
    apply_change,
    change,
    message_bytes,
    packed_bytes,
    words,
)
from rlbench.weights.manifest import Layout

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool, torch.complex128]
SHARES = [0.0, 0.001, 0.02, 0.1, 0.3, 0.6, 0.9, 1.0]


def drawn(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits at all: NaNs with payloads, infinities, subnormals, both zeros."""
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), generator=torch.Generator().manual_seed(seed))
    return data.to(torch.uint8).view(dtype).reshape(shape)


def changed(before: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """As `before`, but a share of its elements."""
    other = drawn(before.dtype, tuple(before.shape), seed + 1)
    at = torch.rand(before.shape, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(at, other, before)


def sent(sender: Copies, receiver: Copies, named: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """Return what arrives, and how many bytes it took."""
    layout = Layout(1 << 30, named.items()).buckets
    entries = [entry for bucket in layout for entry in bucket.entries]
    buffer = torch.empty(sum(bucket.nbytes for bucket in layout), dtype=torch.uint8)
    heads, nbytes = sender.pack(named.items(), buffer)
    assert message_bytes(entries, heads) == nbytes <= len(buffer)
    return dict(receiver.unpack(entries, heads, buffer[:nbytes].clone())), nbytes


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    np.testing.assert_array_equal(words(got), words(wanted))


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.one_of(
        st.just(()),
        st.just((0, 4)),
        st.tuples(st.integers(1, 30)),
        st.tuples(st.integers(1, 40), st.integers(1, 70)),
        st.tuples(st.integers(1000, 6000)),
    ),
    shares=st.lists(st.sampled_from(SHARES), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
)
def test_whatever_changes_arrives_to_the_bit(
    dtype: torch.dtype, shape: tuple[int, ...], shares: list[float], seed: int
) -> None:
    sender, receiver = Copies(), Copies()
    now = {"w": drawn(dtype, shape, seed), "other": drawn(torch.float32, (3, 5), seed)}
    for step, share in enumerate([1.0, *shares]):
        now = {name: changed(tensor, share, seed + 10 * step) for name, tensor in now.items()}
        got, _ = sent(sender, receiver, now)
        assert list(got) == list(now)
        for name, tensor in now.items():
            assert_same_bits(got[name], tensor)
    assert sender.nbytes == receiver.nbytes == sum(tensor.nbytes for tensor in now.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_signs_of_zero_and_payloads_of_nans_are_changes(dtype: torch.dtype) -> None:
    before = torch.zeros(64, dtype=dtype)
    now = before.clone()
    now[3] = -0.0
    words(now)[5] = words(torch.tensor([float("nan")], dtype=dtype))[0] + 1
    again = now.clone()
    words(again)[5] += 1
    for old, new, count in ((before, now, 2), (now, now.clone(), 0), (now, again, 1)):
        found = change(words(old), words(new))
        assert found.count == count, "a NaN is itself, and another one is not"
        assert_makes(found, words(old), words(new))


def assert_makes(found: Change, before: Words, now: Words) -> int:
    """Return the bytes of a change that makes `now` of `before`."""
    held, packed = before.copy(), np.zeros(now.nbytes + 64, np.uint8)
    nbytes = found.pack(packed)
    assert nbytes == packed_bytes(found.form, found.count, len(now), now.itemsize)
    apply_change(held, found.form, found.count, packed[:nbytes])
    np.testing.assert_array_equal(held, now)
    return nbytes


def test_what_is_not_contiguous_is_sent_in_the_order_of_its_elements() -> None:
    sender, receiver = Copies(), Copies()
    now = drawn(torch.bfloat16, (20, 50), 0)
    for tensor in (now.t(), changed(now, 0.1, 3).t(), now.t()[::2].repeat(2, 1), now.t()):
        assert_same_bits(sent(sender, receiver, {"w": tensor})[0]["w"], tensor)


@pytest.mark.parametrize(
    ("share", "form"),
    [(0.0, GAPS), (0.001, GAPS), (0.04, GAPS), (0.25, MASK), (0.8, MASK), (0.97, WHOLE), (1.0, WHOLE)],
)
def test_the_smallest_form_is_taken(share: float, form: int) -> None:
    before = np.zeros(200_000, np.int16)
    now = (np.random.default_rng(0).random(200_000) < share).astype(np.int16)
    found, count = change(before, now), int(np.count_nonzero(now))
    assert found.form == form
    assert assert_makes(found, before, now) <= min(now.nbytes, packed_bytes(MASK, count, len(now), 2))
    if form == GAPS:  # those that only bridge a stretch are few
        assert count <= found.count <= count + len(now) // 256


@pytest.mark.parametrize("lone", [0, 1, 254, 255, 256, 257, 511, 512, 513, 70_000, 99_999])
def test_a_stretch_of_any_length_is_bridged(lone: int) -> None:
    before = np.zeros(100_000, np.int32)
    now = before.copy()
    now[lone] = 7
    found = change(before, now)
    assert found.form == GAPS and found.count == lone // 256 + 1
    assert_makes(found, before, now)


def test_nothing_changed_takes_no_bytes_and_everything_no_more_than_the_whole() -> None:
    sender, receiver = Copies(), Copies()
    now = {"w": drawn(torch.bfloat16, (100, 7), 0), "b": drawn(torch.bfloat16, (3,), 1)}
    whole = sent(sender, receiver, now)[1]
    assert sent(sender, receiver, now)[1] == 0
    assert sent(sender, receiver, {name: changed(tensor, 1.0, 5) for name, tensor in now.items()})[1] == whole


def test_a_tensor_of_another_shape_or_type_goes_whole() -> None:
    sender, receiver = Copies(), Copies()
    for tensor in (torch.ones(10), torch.ones(12), torch.ones(12, dtype=torch.bfloat16), torch.ones(6)):
        got, nbytes = sent(sender, receiver, {"w": tensor})
        assert nbytes >= tensor.nbytes
        assert_same_bits(got["w"], tensor)


def test_copies_of_another_sync_are_no_base_and_those_of_a_sync_under_way_neither() -> None:
    copies = Copies()
    copies.begin("")
    copies.hold("one")
    with pytest.raises(WeightSyncError, match=r"of sync 'two', and the copy held here is of 'one'.*sync again"):
        copies.begin("two")
    assert copies.token == "one", "what is refused changes nothing"
    copies.begin("one")
    with pytest.raises(WeightSyncError, match="held here is of 'none'"):
        copies.begin("one")


def test_differences_without_a_copy_are_refused() -> None:
    sender = Copies()
    now = {"w": torch.ones(1000)}
    sent(sender, Copies(), now)
    with pytest.raises(WeightSyncError, match=r"'w'.*no copy"):
        sent(sender, Copies(), now)


@pytest.mark.parametrize(
    ("form", "count", "said"),
    [(7, 1, "form 7"), (MASK, 1, "3 elements changed"), (GAPS, 101, "101 values"), (WHOLE, 3, "3 values")],
)
def test_a_change_that_makes_no_sense_is_refused(form: int, count: int, said: str) -> None:
    before = np.zeros(100, np.int16)
    data = np.zeros(1000, np.uint8)
    data[:13] = np.packbits(np.isin(np.arange(100), [1, 50, 99]))
    with pytest.raises(WeightSyncError, match=said):
        apply_change(before, form, count, data)
    assert not before.any(), "it keeps what it had"


def test_a_change_beyond_the_end_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="element 200 of a tensor that has 100"):
        apply_change(np.zeros(100, np.int16), GAPS, 1, np.full(1000, 200, np.uint8))
