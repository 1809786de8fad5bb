"""What a rank says of its memory while others look: by owner, following what moves, without walking its tensors."""

import mmap

import pytest
import torch
from torch import nn

from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.memory.owners import beyond
from rlbench.strategies.memory.peak import pass_peak
from rlbench.workers.train.states import Residency

MIB = 1 << 20


@pytest.fixture
def rank():
    """A module of 16 MiB with its optimizer, on the host."""
    module = nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.AdamW(module.parameters())
    device = RankDevice(torch.device("cpu"))
    residency = Residency(module, device, lambda: [optimizer], lambda: "nowhere")
    residency.measure()
    return module, optimizer, residency


def owners(residency):
    told = residency.memory()
    return {name: told[name] for name in ("weights", "gradients", "optimizer", "activations", "other")}


def test_parts_are_counted_as_they_come_and_go(rank):
    module, optimizer, residency = rank
    assert (owners(residency)["weights"], owners(residency)["gradients"]) == (16 * MIB, 0)
    module(torch.randn(4, 2048)).sum().backward()
    residency.measure()
    assert owners(residency)["gradients"] == 16 * MIB
    optimizer.step()
    module.zero_grad()
    residency.measure()
    held = owners(residency)
    assert held["gradients"] == 0 and 32 * MIB <= held["optimizer"] < 33 * MIB
    residency.move("meta", ["optimizer"])
    residency.measure()
    assert owners(residency)["optimizer"] == 0


def test_released_weights_take_nothing(rank):
    _, _, residency = rank
    residency.move("meta", ["weights"])
    residency.measure()
    assert owners(residency)["weights"] == 0
    residency.move("cuda", ["weights"])
    residency.measure()
    assert owners(residency)["weights"] == 16 * MIB


def test_a_loop_that_tells_nobody_is_counted_as_it_computes(rank, monkeypatch):
    monkeypatch.setattr("rlbench.workers.train.states.MEASURED_S", 0.0)
    module, optimizer, residency = rank
    for _ in range(2):  # a trainer's, or a cell's
        module(torch.randn(4, 2048)).sum().backward()
    assert owners(residency)["gradients"] == 16 * MIB
    optimizer.step()
    module(torch.randn(4, 2048))
    assert owners(residency)["optimizer"] >= 32 * MIB


def test_a_short_call_is_counted_when_somebody_asks(rank):
    module, _, residency = rank
    module.weight.grad = torch.ones(2048, 2048)
    residency.measure_after(0.0)
    assert owners(residency)["gradients"] == 0, "it took less than the count does"
    residency.settle()
    assert owners(residency)["gradients"] == 16 * MIB
    module.zero_grad()
    residency.measure_after(1.0)
    assert owners(residency)["gradients"] == 0, "the longer one is counted at once"
    residency.measure_after(0.0)
    module.weight.grad = torch.ones(2048, 2048)
    with residency.passing():
        assert owners(residency)["gradients"] == 16 * MIB


def test_what_a_short_call_left_is_counted_in_a_pass_and_is_none_of_its_activations(rank):
    module, _, residency = rank
    residency.measure()
    module.weight.grad = torch.ones(2048, 2048)
    residency.measure_after(0.0)
    with residency.passing(settled=False):
        assert owners(residency)["gradients"] == 0, "the pass did not wait for the count"
        before = owners(residency)["activations"]
        residency.settle()
        assert owners(residency)["gradients"] == 16 * MIB
        assert owners(residency)["activations"] <= before + MIB
        held = torch.ones(8 << 20)
        assert owners(residency)["activations"] == pytest.approx(before + held.nbytes, abs=4 * MIB)


def test_models_beside_the_policy_are_counted_and_not_what_offloading_frees():
    policy, critic = nn.Linear(1024, 1024, bias=False), nn.Linear(2048, 1024, bias=False)
    steps = torch.optim.AdamW(critic.parameters())
    residency = Residency(policy, RankDevice(torch.device("cpu")), list, lambda: "", lambda: ([critic], [steps]))
    critic(torch.randn(4, 2048)).sum().backward()
    steps.step()
    residency.measure()
    held = owners(residency)
    assert (held["weights"], held["gradients"]) == (12 * MIB, 8 * MIB) and held["optimizer"] >= 16 * MIB


def test_owners_add_up_to_the_process(rank):
    _, _, residency = rank
    told = residency.memory()
    assert sum(owners(residency).values()) == pytest.approx(told["rss"], abs=4 * MIB)
    assert told["device"] == "host" and told["frees"] == {"weights": 0, "optimizer": 0}


def test_activations_are_what_a_pass_has_grown_by_without_its_gradients(rank):
    module, optimizer, residency = rank
    assert residency.memory()["activations"] == 0
    with residency.passing():
        held = mmap.mmap(-1, 200 * MIB)  # pages of its own, whatever the allocator kept from earlier tests
        for page in range(0, 200 * MIB, mmap.PAGESIZE):
            held[page] = 1
        assert 190 * MIB < residency.memory()["activations"] < 230 * MIB
        held.close()
        module.weight.grad = torch.ones(2048, 2048)
        residency.measure()
        optimizer.state[module.weight] = {"exp_avg": torch.ones(2048, 2048)}  # a step keeps what it took meanwhile
        residency.measure()
        assert residency.memory()["activations"] < 8 * MIB, "gradients and moments are owners of their own"
    assert residency.memory()["activations"] == 0


def test_a_look_walks_no_tensors(rank, monkeypatch):
    from rlbench.strategies.memory import owners as memory

    _, _, residency = rank
    monkeypatch.setattr(memory, "nbytes", lambda tensors: pytest.fail("walked"))
    assert residency.memory()["weights"] == 16 * MIB


def test_the_peak_of_a_pass_is_its_own():
    def peak_of(size):
        with pass_peak() as peak:
            held = mmap.mmap(-1, size)
            for page in range(0, size, mmap.PAGESIZE):
                held[page] = 1
            held.close()
        return peak.bytes

    large, small = peak_of(300 * MIB), peak_of(20 * MIB)
    if large is None:
        pytest.skip("this container does not allow the high-water mark to be set back")
    assert 250 * MIB < large - small < 310 * MIB, "the second pass forgot the first"


def test_a_host_has_no_allocator_to_ask():
    assert beyond({"weights": 5}, torch.device("cpu")) == {}


@pytest.mark.gpu
def test_on_a_gpu_activations_are_what_nothing_known_holds():
    device = torch.device("cuda", torch.cuda.current_device())
    start = beyond({}, device)["activations"]
    weights = torch.zeros(16 * MIB // 4, device=device)
    passing = torch.zeros(8 * MIB // 4, device=device)
    said = beyond({"weights": weights.untyped_storage().nbytes() + start}, device)
    assert said["activations"] == passing.untyped_storage().nbytes()
    assert said["reserved"] == said["allocated"] + said["other"]
    del passing
    assert beyond({"weights": 16 * MIB + start}, device)["activations"] == 0
