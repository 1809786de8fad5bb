"""Host memory that is there before it is used: pages come with the first that is written into them."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from rlbench.weights.memory import UntouchedZeros, drop_pages
from rlbench.workers.replica.state import untouched_kv

PAGES = 64


@pytest.fixture
def cache() -> torch.Tensor:
    with UntouchedZeros():
        return torch.zeros(PAGES * mmap.PAGESIZE, dtype=torch.int8, device=torch.device("cpu"))


def untouched(tensor: torch.Tensor) -> int:
    """Pages that nothing was written to."""
    storage = tensor.untyped_storage()
    return untouched_kv([{"pid": os.getpid(), "kv_ranges": [(storage.data_ptr(), storage.nbytes())]}]) // mmap.PAGESIZE


def test_pages_come_as_they_are_written_to_and_go_when_they_are_dropped(cache: torch.Tensor) -> None:
    assert untouched(cache) == PAGES
    cache[: 3 * mmap.PAGESIZE].fill_(1)
    assert untouched(cache) == PAGES - 3 and int(cache.sum()) == 3 * mmap.PAGESIZE
    drop_pages(cache.untyped_storage())
    assert untouched(cache) == PAGES and not cache.any()


def test_views_of_another_kind_read_and_write_it(cache: torch.Tensor) -> None:
    blocks = cache.view(torch.float32).view(PAGES, -1)
    blocks[1] = 2.0
    assert untouched(cache) == PAGES - 1 and float(blocks.sum()) == 2.0 * blocks.shape[1]


def test_what_another_process_holds_is_not_looked_at() -> None:
    assert untouched_kv([{"pid": 0, "kv_ranges": [(0, 1 << 20)]}]) == 0


def test_other_zeros_are_torchs() -> None:
    with UntouchedZeros():
        made = [
            torch.zeros(3),
            torch.zeros(2, 2, dtype=torch.int8),
            torch.zeros((4,)),
            torch.zeros(0, dtype=torch.int8),
        ]
        kept = torch.zeros(3, dtype=torch.int8, requires_grad=False)
    assert [tuple(one.shape) for one in [*made, kept]] == [(3,), (2, 2), (4,), (0,), (3,)]
    assert not any(one.any() for one in [*made, kept])
