"""The ranks' group on each kind of host, and that what it does is counted."""

from __future__ import annotations

import pytest

from tests.ranks import said_by_fork

pytestmark = pytest.mark.slow

GROUP = """
import torch
import torch.distributed as dist
from rlbench.strategies.ranks.control import ControlGroup, issued_collectives
from rlbench.strategies.memory.device import RankDevice

device = RankDevice.pick(0, {kind!r})
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **device.group_arguments())
control, counts = ControlGroup(), [issued_collectives()]
for place in {places!r}:
    dist.all_reduce(torch.ones(1, device=place))
    counts.append(issued_collectives())
dist.all_reduce(torch.ones(1), group=control.group)
counts.append(issued_collectives())
print("COUNTED", [after - before for before, after in zip(counts, counts[1:])])
dist.destroy_process_group()
"""


def counted(kind: str, places: list[str]) -> str:
    """What a process of one rank says that it issued."""
    return said_by_fork(GROUP.format(kind=kind, places=places))


def test_collectives_of_all_groups_are_counted() -> None:
    assert "COUNTED [1, 1, 1]" in counted("cpu", ["cpu", "cpu"])


def test_the_count_does_not_fall_where_a_group_is_left() -> None:
    """A peer is seen to wait by having issued more than the rank that failed, which may have left a group before."""
    script = """
import gc
import torch
import torch.distributed as dist
from rlbench.strategies.ranks.control import ControlGroup, issued_collectives

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
control = ControlGroup()
dist.all_reduce(torch.ones(1), group=control.group)
before = issued_collectives()
groups = len(dist.distributed_c10d._world.pg_map)
del control
gc.collect()
print("LEFT", groups - len(dist.distributed_c10d._world.pg_map), before - issued_collectives(), before > 0)
"""
    assert "LEFT 1 0 True" in said_by_fork(script)


@pytest.mark.gpu
def test_on_a_gpu_shards_in_host_memory_have_a_group_too_and_both_are_counted() -> None:
    """`fsdp_cpu_offload`: "No backend type associated with device type cpu"."""
    assert "COUNTED [1, 1, 1, 1]" in counted("cuda", ["cuda", "cpu", "cuda"])


@pytest.mark.gpu
def test_on_a_gpu_the_memory_of_a_rank_is_the_gpus() -> None:
    import torch

    from rlbench.strategies.memory.device import RankDevice

    assert RankDevice.pick(0, "cpu").memory == 0
    assert RankDevice.pick(0, "cuda").memory == pytest.approx(torch.cuda.mem_get_info(0)[1], rel=0.02)
