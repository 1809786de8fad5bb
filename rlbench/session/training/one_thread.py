"""Small tensors in the kernel on one thread: several spend more time waiting for each other than computing, the more so
while the ranks use the cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread of this process inside; as many as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
