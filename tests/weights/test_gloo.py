"""All gloo groups of a process take one device, and compute what groups with devices of their own compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.modules import qwen_on_meta, save_qwen
from tests.ranks import ranks

pytestmark = pytest.mark.slow


def further_groups() -> tuple[int, int, list[float]]:
    """Make groups of all ranks and of this one alone; return the device threads before and after, and their sums."""
    import os

    import torch
    import torch.distributed as dist

    def device_threads() -> int:
        names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
        return names.count("gloo_tcp_loop")

    before, rank = device_threads(), dist.get_rank()
    groups = [dist.new_group(backend="gloo"), dist.new_group(backend="gloo")]
    groups.append([dist.new_group([one], backend="gloo") for one in range(2)][rank])
    works, numbers = [], [torch.full((3,), 10.0**place + rank) for place in range(3)]
    for number, group in zip(numbers, groups, strict=True):
        works.append(dist.all_reduce(number, group=group, async_op=True))  # all under way at once
    for work in works:
        work.wait()
    after = device_threads()
    for group in groups:
        dist.destroy_process_group(group)
    return before, after, [number[0].item() for number in numbers]


def test_groups_share_the_device_and_do_not_mix_what_they_send(tmp_path: Path) -> None:
    with ranks(2, qwen_on_meta(save_qwen(tmp_path / "model"))) as engine:
        for rank, (before, after, sums) in enumerate(engine.run(further_groups)):
            assert 1 <= before == after
            assert sums == [3.0, 21.0, 100.0 + rank]
