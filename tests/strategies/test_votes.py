"""How ranks agree on what comes next, on one rank: what several do is seen in `test_device`."""

import pytest
import torch.distributed as dist

from rlbench.strategies.ranks.control import ControlGroup


class Falsy(Exception):
    """As a user's may be: with a length, of nothing."""

    def __len__(self) -> int:
        return 0


@pytest.fixture
def control():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ControlGroup()
    dist.destroy_process_group()


def test_every_failure_counts_whatever_it_says_of_itself(control):
    with pytest.raises(Falsy):
        control.stops("a pass", Falsy(), asked=False)


def test_a_failure_is_heard_before_a_stop(control):
    with pytest.raises(Falsy):
        control.stops("a pass", Falsy(), asked=True)
    assert control.stops("a pass", None, asked=True) and not control.stops("a pass", None, asked=False)
