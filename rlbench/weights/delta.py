"""Weights sent as differences to those sent before: which elements changed, and what they are now. Lossless.

Elements are compared and set as integers of their width, so each NaN and the sign of a zero arrive as they are. A
tensor goes in the form that takes the fewest bytes, counted each time: whole; the changed values behind a bit for each
element; or behind a byte for each value, which says how many elements to skip (a value that did not change goes along
where that is more than a byte says). Both sides hold a copy of what was sent last, in host memory, where they are
compared. Whether the two are of one sync their tokens say, as in `unchanged.py`; of the tensors themselves nothing is
assumed, so what adapters are merged into, or a hook of the user's makes, goes as the rest does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbench.errors import WeightSyncError
from rlbench.weights.manifest import ALIGNMENT, TensorEntry

Words = np.ndarray[Any, np.dtype[Any]]
"""A tensor's elements as integers of their width, (elements,)."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

WHOLE, MASK, GAPS = 0, 1, 2
FORMS = (WHOLE, MASK, GAPS)
KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NUMBERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
HEAD = 2  # numbers that say how a tensor comes, int64: its form and the number of values
SKIP = 256  # elements that a byte of GAPS goes forward at most


@dataclass(frozen=True)
class Change:
    """How words come to be what they are now: `count` values and their `places`."""

    form: int
    places: Bytes
    values: Words

    @property
    def count(self) -> int:
        """Values that travel."""
        return len(self.values)

    def pack(self, into: Bytes) -> int:
        """Write it to the beginning of a buffer; return how many bytes it takes."""
        begin = _padded(len(self.places))
        into[: len(self.places)] = self.places
        into[begin : begin + self.values.nbytes].view(self.values.dtype)[:] = self.values
        return begin + self.values.nbytes


def words(tensor: Tensor) -> Words:
    """Return the elements of a tensor in their order, on the host; two words of each that is wider than eight bytes."""
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return flat.view(KINDS[min(flat.element_size(), 8)]).numpy()


def packed_bytes(form: int, count: int, size: int, width: int) -> int:
    """Return the bytes that a change of `size` words, each `width` bytes, takes in a form with `count` values."""
    return _padded(_place_bytes(form, count, size)) + count * width


def change(before: Words | None, now: Words) -> Change:
    """Return what makes the words `before` (None: nothing is known of them) those of `now`, in the smallest form."""
    size, width = len(now), now.itemsize
    whole = Change(WHOLE, np.empty(0, np.uint8), now)
    if before is None or before.dtype != now.dtype or len(before) != size:
        return whole
    changed = before != now
    count = int(np.count_nonzero(changed))
    nbytes = {form: packed_bytes(form, count, size, width) for form in (MASK, GAPS)}
    nbytes[WHOLE] = packed_bytes(WHOLE, size, size, width)
    smallest = min(nbytes.values())
    if nbytes[WHOLE] == smallest:
        return whole
    at = np.flatnonzero(changed)
    if nbytes[GAPS] == smallest:
        gaps, bridged = _gaps(at)
        nbytes[GAPS] = packed_bytes(GAPS, len(bridged), size, width)
        if nbytes[GAPS] == min(nbytes.values()):
            return Change(GAPS, gaps, now[bridged])
    return Change(MASK, np.packbits(changed), now[at]) if nbytes[MASK] < nbytes[WHOLE] else whole


def apply_change(before: Words, form: int, count: int, data: Bytes) -> None:
    """Make words what a change in a form with `count` values, packed as `data`, says; in place."""
    size = len(before)
    if form not in FORMS or not 0 <= count <= size or (form == WHOLE and count != size):
        raise WeightSyncError(f"a change of {size} elements came with the form {form} and {count} values: sync again")
    places = data[: _place_bytes(form, count, size)]
    begin = _padded(len(places))
    values = data[begin : begin + count * before.itemsize].view(before.dtype)
    if form == WHOLE:
        before[:] = values
    elif form == MASK:
        at = np.flatnonzero(np.unpackbits(places, count=size).view(np.bool_))
        if len(at) != count:
            raise WeightSyncError(f"a change says {len(at)} elements changed, and came with {count} values: sync again")
        before[at] = values
    elif count:
        at = np.cumsum(places.astype(np.int64) + 1) - 1
        if at[-1] >= size:
            raise WeightSyncError(f"a change is about element {at[-1]} of a tensor that has {size}: sync again")
        before[at] = values


class Copies:
    """What one side holds of what was sent last: each tensor's words by name, in host memory, and the `token` of that
    sync; "": of none that is whole."""

    def __init__(self) -> None:
        self.token = ""
        self._held: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that they take."""
        return sum(held.nbytes for held in self._held.values())

    def begin(self, follows: str) -> None:
        """Expect changes of what the token `follows` stands for; "": all tensors, whole."""
        if follows and follows != self.token:
            raise WeightSyncError(
                f"differences came to the weights of sync {follows!r}, and the copy held here is of "
                f"{self.token or 'none'!r}: sync again, and all weights are sent"
            )
        if not follows:
            self._held.clear()
        self.token = ""

    def hold(self, token: str) -> None:
        """All has come or gone: the copies are of this sync."""
        self.token = token

    def pack(self, tensors: Iterable[tuple[str, Tensor]], buffer: Tensor) -> tuple[Tensor, int]:
        """Write the changes of tensors to a buffer of bytes, which has room for them whole; return heads, (n, 2) int64,
        and the bytes written. The copies are of these tensors then."""
        into, heads, end = buffer.numpy(), [], 0
        for name, tensor in tensors:
            now = words(tensor)
            held = self._held.get(name)
            made = change(None if held is None else held.numpy(), now)
            end += _aligned(made.pack(into[end:]))
            heads.append((made.form, made.count))
            self._keep(name, now)
        return torch.tensor(heads, dtype=torch.int64).reshape(-1, HEAD), end

    def unpack(self, entries: Sequence[TensorEntry], heads: Tensor, data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Take all that `pack` wrote, then yield (name, tensor): views of the copies, which stay as they are until the
        next sync."""
        came = data.numpy()
        for entry, form, count, begin, nbytes in _places(entries, heads):
            packed = came[begin : begin + nbytes]
            if form == WHOLE:
                self._keep(entry.name, packed.view(NUMBERS[_width(entry)]))
            elif (held := self._held.get(entry.name)) is None or held.nbytes != entry.nbytes:
                raise WeightSyncError(f"differences of {entry.name!r} came, of which no copy is held here: sync again")
            else:
                apply_change(held.numpy(), form, count, packed)
        for entry in entries:
            yield entry.name, self._held[entry.name].view(getattr(torch, entry.dtype)).view(entry.shape)

    def _keep(self, name: str, now: Words) -> None:
        kind, held = KINDS[now.itemsize], self._held.get(name)
        if held is None or held.dtype != kind or len(held) != len(now):
            held = self._held[name] = torch.empty(len(now), dtype=kind)
        held.numpy()[:] = now


def message_bytes(entries: Iterable[TensorEntry], heads: Tensor) -> int:
    """Return the bytes that `Copies.pack` wrote, by the heads it gave."""
    return max((begin + _aligned(nbytes) for _, _, _, begin, nbytes in _places(entries, heads)), default=0)


def _places(entries: Iterable[TensorEntry], heads: Tensor) -> list[tuple[TensorEntry, int, int, int, int]]:
    """Return each tensor's form, number of values, where it begins in the message and its bytes."""
    found, begin = [], 0
    for entry, (form, count) in zip(entries, heads.tolist(), strict=True):
        width = _width(entry)
        size = entry.nbytes // width
        if form not in FORMS or not 0 <= count <= size:
            raise WeightSyncError(
                f"{entry.name!r} was announced in the form {form} with {count} values, and has {size}: sync again"
            )
        nbytes = packed_bytes(form, count, size, width)
        found.append((entry, form, count, begin, nbytes))
        begin += _aligned(nbytes)
    return found


def _width(entry: TensorEntry) -> int:
    """Return the bytes of a word of a tensor."""
    return min(int(getattr(torch, entry.dtype).itemsize), 8)


def _place_bytes(form: int, count: int, size: int) -> int:
    return {WHOLE: 0, MASK: -(-size // 8), GAPS: count}[form]


def _gaps(at: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Bytes, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return how many elements lie before each value since the one before, and the places of the values: those of `at`,
    and every 256th of a longer stretch without."""
    between = np.diff(at, prepend=-1) - 1
    ends = np.cumsum(between // SKIP + 1) - 1
    gaps = np.full(int(ends[-1]) + 1 if len(ends) else 0, SKIP - 1, np.int64)
    gaps[ends] = between % SKIP
    return gaps.astype(np.uint8), np.cumsum(gaps + 1) - 1


def _padded(nbytes: int) -> int:
    """Return where words may begin behind so many bytes."""
    return -(-nbytes // 8) * 8


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
