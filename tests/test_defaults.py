"""What is chosen where nobody said: each with a reason, from plain facts of the device."""

import pytest

from rlbench import defaults
from rlbench.units import GIB, MIB


@pytest.mark.parametrize(
    ("copy", "room", "depth"),
    [(MIB, 8 * GIB, 4), (GIB, 8 * GIB, 3), (GIB, 4 * GIB, 1), (3 * GIB, 4 * GIB, 0), (GIB, 0, 0), (0, GIB, 4)],
)
def test_as_many_steps_can_be_undone_as_copies_take_half_of_what_is_free(copy, room, depth):
    chosen, default = defaults.undo_depth(copy, room)
    assert chosen == depth and (default.option, default.value) == ("undo", str(depth))
    assert depth == 0 or (depth + 1) * copy <= room / 2


def test_graphs_are_captured_on_a_gpu_and_the_cache_is_what_its_share_leaves():
    assert [defaults.eager(on_gpu).value for on_gpu in (True, False)] == ["False", "True"]
    assert defaults.cache_size(True, 0.5)[:2] == ("gpu_memory_utilization", "0.5")
    assert defaults.cache_size(False, 0.5)[:2] == ("kv_cache_bytes", "1 GiB")
    assert all(choice.reason for choice in (defaults.eager(True), defaults.cache_size(False, 0.5)))
