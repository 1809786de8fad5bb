"""What a model computes with comes back to the bit, at the addresses it had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rlbench.weights.aside import Aside


class Packed(nn.Module):
    """As vLLM's layers on a CPU: the weight is gone, a closure holds a packed copy; and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.absorbed = torch.randn(3)
        self.pack(torch.randn(3))

    def pack(self, weight: Tensor) -> None:
        self.cpu_linear = lambda x: x * weight + self.absorbed

    def forward(self, x: Tensor) -> Tensor:
        return self.cpu_linear(x)


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Packed(), nn.Linear(3, 3))
    made[3].weight = made[0].weight  # tied
    return made.eval()


def test_weights_buffers_and_packed_copies_come_back_however_they_were_replaced() -> None:
    own, x = model(), torch.randn(4, 3)
    before, address = own(x), own[0].weight.data_ptr()
    aside = Aside(own)
    with torch.no_grad():
        own[0].weight.fill_(7.0)  # in place
        own[1].running_mean += 1.0
        own[2].absorbed.zero_()
        own[2].pack(torch.zeros(3))
        own[3].bias = nn.Parameter(torch.ones(3))  # by another one
        own[3].weight = nn.Parameter(torch.eye(3))
    assert not torch.equal(own(x), before)
    aside.put_back()
    assert torch.equal(own(x), before)
    assert own[3].weight is own[0].weight and own[0].weight.data_ptr() == address


def test_the_kv_cache_is_neither_copied_nor_put_back() -> None:
    """Of a replica it is most of the memory, and what it holds is not of the weights."""
    own = model()
    own[2].kv_cache = cache = torch.zeros(4)
    aside = Aside(own)
    cache.fill_(1.0)
    aside.put_back()
    assert own[2].kv_cache is cache and torch.equal(cache, torch.ones(4))


@pytest.mark.gpu
def test_on_a_gpu_they_come_back_from_host_memory_at_the_addresses_that_graphs_hold() -> None:
    own, x = model().cuda(), torch.randn(4, 3, device="cuda")
    own[2].absorbed = own[2].absorbed.cuda()
    own[2].pack(torch.randn(3, device="cuda"))
    before, addresses = own(x), [parameter.data_ptr() for parameter in own.parameters()]
    taken = torch.cuda.memory_allocated()
    aside = Aside(own)
    assert torch.cuda.memory_allocated() == taken, "the copies are in host memory"
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.fill_(7.0)
        own[3].bias = nn.Parameter(torch.ones(3, device="cuda"))
    assert not torch.equal(own(x), before)
    aside.put_back()
    assert torch.equal(own(x), before)
    assert [parameter.data_ptr() for parameter in own.parameters()] == addresses
