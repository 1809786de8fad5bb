"""Modules of the user's own with peft's adapters: without hooks, and with those that the documents print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import peft
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM

import rlbench as rb
from rlbench.errors import BuildError, WeightSyncError
from tests.engines.syncing import gap

pytestmark = pytest.mark.engine


class Plain(rb.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        self.optimizer = self.strategy.create_optimizer(self, lr=1e-2, weight_decay=0.0)


class Hooked(Plain):
    """As the guide prints it."""

    def preprocess_input_named_parameters(self, name: str, param: torch.Tensor) -> tuple[str, torch.Tensor]:
        if not hasattr(self, "weight_mapping"):
            raise ValueError("weight_mapping is not set")
        if name in self.weight_mapping:
            name = self.weight_mapping[name]
        return name, param

    def postprocess_output_named_parameters(
        self, name: str, param: DTensor, full_state_dict: Any
    ) -> tuple[str, torch.Tensor]:
        if "base_layer.weight" in name:
            lora_a = full_state_dict[name.replace("base_layer.", "lora_A.default.")]
            lora_b = full_state_dict[name.replace("base_layer.", "lora_B.default.")]
            whole = param.full_tensor() + lora_b.full_tensor() @ lora_a.full_tensor()
        else:
            whole = param.full_tensor()
        name = name.replace("base_model.model.", "").replace("base_layer.", "")
        return name, whole


def made(cls: type, path: Any, alpha: int) -> Any:
    with rb.nn.device("meta"):
        module = cls.from_pretrained(str(path))  # type: ignore[attr-defined]
        config = peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"])
        module.requires_grad_(False)
        peft.inject_adapter_in_model(config, module, low_cpu_mem_usage=True)
    if cls is Hooked:
        names = [name for name, _ in module.named_parameters() if ".base_layer." in name]
        module.weight_mapping = {name.replace("base_layer.", ""): name for name in names}
    return module


@pytest.fixture(scope="module")
def infer(cluster: Any, tiny_path: Any) -> Iterator[Any]:
    engine = rb.InferenceEngine(str(tiny_path), name="peft-inference", kv_cache_bytes=256 << 20)
    engine.build(tensor_parallel_size=1, data_parallel_size=1)
    yield engine
    engine.close()


def trained(cls: type, infer: Any, path: Any, alpha: int) -> Any:
    train = rb.TrainEngine(made(cls, path, alpha), name=f"peft-{cls.__name__}-{alpha}")
    train.build(tensor_parallel_size=2, data_parallel_size=1, colocate_with=infer)
    return train


def change_adapters() -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():  # type: ignore[name-defined]
            if ".lora_" in name:
                parameter.to_local().normal_(0, 0.2)


@pytest.mark.parametrize(("cls", "alpha"), [(Plain, 12), (Hooked, 4)])
def test_a_module_with_adapters_is_built_trained_and_sent_merged(
    cls: type, alpha: int, infer: Any, tiny_path: Any
) -> None:
    with closing(trained(cls, infer, tiny_path, alpha)) as train:
        assert train.p2p_weight_sync(infer)["gap"] <= 1e-4, "B begins at zero"
        train.run(change_adapters)
        assert gap(train, infer) > 1e-2
        assert train.p2p_weight_sync(infer)["gap"] <= 1e-4 and gap(train, infer) <= 1e-4


def test_a_hook_that_forgets_alpha_over_rank_is_found_by_the_proof(infer: Any, tiny_path: Any) -> None:
    with closing(trained(Hooked, infer, tiny_path, 16)) as train:
        train.run(change_adapters)
        with pytest.raises(WeightSyncError, match="postprocess_output_named_parameters"):
            train.p2p_weight_sync(infer)
    infer.reload()


def test_a_strategys_step_moves_the_adapters_alone(infer: Any, tiny_path: Any) -> None:
    with closing(trained(Plain, infer, tiny_path, 8)) as train:
        found = train.run(step_by_strategy)
        assert found == [(True, True)] * 2


def step_by_strategy() -> tuple[bool, bool]:
    """Whether a step moved the adapters, and left the base where it was."""
    before = {name: p.to_local().clone() for name, p in module.named_parameters()}  # type: ignore[name-defined]
    loss = module(torch.arange(12)[None]).logits.float().square().mean()  # type: ignore[name-defined]
    strategy.backward(loss, module, module.optimizer)  # type: ignore[name-defined]
    strategy.optimizer_step(module.optimizer, module, None)  # type: ignore[name-defined]
    after = dict(module.named_parameters())  # type: ignore[name-defined]
    same = {name: torch.equal(before[name], after[name].to_local()) for name in before}
    adapters = [so for name, so in same.items() if ".lora_B." in name]  # of A the gradient is zero as long as B is
    return not all(adapters), all(so for name, so in same.items() if ".lora_" not in name)


def test_a_layer_that_is_in_no_checkpoint_is_still_refused(infer: Any, tiny_path: Any) -> None:
    module = made(Plain, tiny_path, 4)
    with rb.nn.device("meta"):
        module.extra = torch.nn.Linear(4, 4)
    train = rb.TrainEngine(module, name="peft-extra")
    with pytest.raises(BuildError, match="extra"):
        train.build(tensor_parallel_size=1, data_parallel_size=1)
    train.close()
