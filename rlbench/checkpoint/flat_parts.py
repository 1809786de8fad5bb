"""Parameters whose numbers lie in a row over the ranks, as FSDP1 splits them: which of them this rank has.

The mark is an attribute of the tensor. A view or a copy of it has none: `marked` gives it one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

MARK = "_flat_part"


@dataclass(frozen=True)
class FlatPart:
    """`numel` numbers from `start` on of a whole of `shape`, flattened, which `count` ranks have between them.

    `group`: the process group of these; `replica`: how many such groups with the same numbers come before.
    """

    shape: tuple[int, ...]
    start: int
    numel: int
    count: int = 1
    replica: int = 0
    group: Any = None

    @property
    def total(self) -> int:
        """Numbers of the whole."""
        return math.prod(self.shape)

    def described(self) -> dict[str, Any]:
        """Return its place in the whole, as plain values."""
        return {"start": self.start, "numel": self.numel, "shape": list(self.shape)}


def mark_of(tensor: Tensor) -> FlatPart | None:
    """Return the mark of a tensor that FSDP1 holds, also of one that is whole on each rank; None: it does not."""
    return getattr(tensor, MARK, None)


def flat_part(tensor: Tensor) -> FlatPart | None:
    """Return which numbers of a split tensor this is; None where FSDP1 has not split it."""
    part = mark_of(tensor)
    return None if part is None or part.count == 1 else part


def marked(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the mark of another one, of which it holds the same numbers."""
    if (part := mark_of(like)) is not None and tensor is not like:
        setattr(tensor, MARK, part)
    return tensor


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole of a tensor that may be split."""
    part = flat_part(tensor)
    return tuple(tensor.shape) if part is None else part.shape
