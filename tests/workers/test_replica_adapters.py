"""An adapter that comes again goes where the last one lies, and is computed with as if vLLM had built it anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlbench.weights.manifest import AdapterInfo
from rlbench.weights.vllm_adapters import _of_layer
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.vllm import VllmReplica
from tests.workers.ending import end_here

from .tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.engine

TOKENS = [[(13 * i) % 250 for i in range(20)]]
WIDTHS = {"q_proj": (128, 128), "k_proj": (128, 64), "v_proj": (128, 64), "o_proj": (128, 128)}
INFO = AdapterInfo(1, 4, 8.0, tuple(WIDTHS))
LAYOUT = 7


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmReplica]:
    folder = make_checkpoint(tmp_path_factory.mktemp("adapters"), tied=True)
    built = VllmReplica(ReplicaConfig(str(folder), dtype="float32", kv_cache_bytes=64 << 20, adapters=2))
    built.build()
    yield built
    end_here(built)


@pytest.fixture
def worker(replica: VllmReplica) -> Iterator[Any]:
    held = replica.built.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    yield held
    for number in (1, 2):
        manager_of(held).remove_adapter(number)


def manager_of(worker: Any) -> Any:
    return worker.model_runner.lora_manager._adapter_manager


def adapter(seed: int, rank: int = 4, layers: int = 2, **targets: tuple[int, int]) -> dict[str, Tensor]:
    """An adapter's tensors by peft's names."""
    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        for target, (width, height) in (targets or WIDTHS).items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, width, generator=random) / 10
            tensors[f"{path}.lora_B.weight"] = torch.randn(height, rank, generator=random) / 10
    return tensors


def take(worker: Any, tensors: dict[str, Tensor], info: AdapterInfo = INFO, layout: int = LAYOUT) -> Any:
    """Have a worker take an adapter in two parts; return vLLM's model of it."""
    named = list(tensors.items())
    worker.start_adapter(info, layout)
    for part in (named[:3], named[3:]):
        worker._adapters.take(iter(part))
    worker.finish_adapter()
    return manager_of(worker).get_adapter(info.number)


def logprobs(replica: VllmReplica, number: int = 1) -> np.ndarray:
    replica.reset_caches()
    return replica.prompt_logprobs(TOKENS, adapter=number)[0]


def built_anew(replica: VllmReplica, worker: Any, tensors: dict[str, Tensor], info: AdapterInfo = INFO) -> np.ndarray:
    """What is computed with an adapter that vLLM builds in another slot."""
    take(worker, tensors, replace(info, number=2), layout=0)
    return logprobs(replica, 2)


@pytest.mark.parametrize("alpha", [8.0, 4.0, 0.0])
def test_the_same_tensors_go_where_the_last_ones_lie(alpha: float, replica: VllmReplica, worker: Any) -> None:
    info = replace(INFO, alpha=alpha)
    first = take(worker, adapter(0), info)
    before = logprobs(replica)
    assert take(worker, adapter(1), info) is first
    np.testing.assert_array_equal(logprobs(replica), built_anew(replica, worker, adapter(1), info))
    assert bool(np.abs(logprobs(replica) - before).max() > 0.01) is (alpha > 0)
    manager = manager_of(worker)
    manager.deactivate_adapter(1)
    manager.activate_adapter(1)  # from its model, as vLLM does
    np.testing.assert_array_equal(logprobs(replica), built_anew(replica, worker, adapter(1), info))


def test_layers_of_which_other_numbers_of_matrices_come_have_no_places_that_are_known() -> None:
    a, b, rows = torch.randn(2, 4), torch.zeros(3, 2), torch.zeros(2, 1, 3, 4)
    weights, module = SimpleNamespace(lora_a=[a], lora_b=b), SimpleNamespace(lora_a_stacked=(rows, rows))
    assert list(_of_layer(weights, module, 1)) == []
    module.lora_b_stacked = (torch.zeros(2, 1, 3, 2),)
    ((matrix, place),) = _of_layer(weights, module, 1)
    assert matrix is b and place.data_ptr() == module.lora_b_stacked[0][1].data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((adapter(1, rank=2), replace(INFO, rank=2), 8), id="rank"),
        pytest.param((adapter(1, q_proj=(128, 128)), replace(INFO, targets=("q_proj",)), 9), id="fewer layers"),
        pytest.param((adapter(1), replace(INFO, alpha=2.0), LAYOUT), id="scale"),
        pytest.param((adapter(1), INFO, 0), id="not known"),
    ],
)
def test_other_tensors_are_built_anew(other: Any, replica: VllmReplica, worker: Any) -> None:
    first = take(worker, adapter(0))
    assert take(worker, *other) is not first
    tensors, info, _ = other
    np.testing.assert_array_equal(logprobs(replica), built_anew(replica, worker, tensors, info))


def test_what_was_set_aside_is_not_written_over(replica: VllmReplica, worker: Any) -> None:
    own = take(worker, adapter(0))
    before = logprobs(replica)
    worker.set_aside(1)
    assert take(worker, adapter(1)) is not own
    assert np.abs(logprobs(replica) - before).max() > 0.01
    worker.put_back()
    np.testing.assert_array_equal(logprobs(replica), before)
    take(worker, adapter(2))
    np.testing.assert_array_equal(logprobs(replica), built_anew(replica, worker, adapter(2)))


def test_one_that_vllm_has_moved_or_that_came_in_part_is_built_anew(replica: VllmReplica, worker: Any) -> None:
    first, manager = take(worker, adapter(0)), manager_of(worker)
    manager.deactivate_adapter(1)
    take(worker, adapter(5), replace(INFO, number=2), layout=0)  # into its slot
    manager.activate_adapter(1)
    second = take(worker, adapter(1))
    assert second is not first
    manager.remove_adapter(2)
    np.testing.assert_array_equal(logprobs(replica), built_anew(replica, worker, adapter(1)))
    worker.start_adapter(INFO, LAYOUT)
    with pytest.raises(KeyError):
        worker._adapters.take(iter({"base_model.model.of_another.lora_A.weight": torch.zeros(4, 128)}.items()))
    assert take(worker, adapter(3)) is not second
    np.testing.assert_array_equal(logprobs(replica), built_anew(replica, worker, adapter(3)))


def test_numbers_of_another_precision_are_those_that_vllm_makes_of_them(replica: VllmReplica, worker: Any) -> None:
    halves = [{name: tensor.bfloat16() for name, tensor in adapter(seed).items()} for seed in (0, 1)]
    first = take(worker, halves[0])
    assert take(worker, halves[1]) is first
    np.testing.assert_array_equal(logprobs(replica), built_anew(replica, worker, halves[1]))
