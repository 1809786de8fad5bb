"""FSDP on one rank: its parameters compute where they lie, and what is trained is what FSDP trains with its copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlbench.strategies.internals import fsdp_groups
from rlbench.strategies.sharding.unsplit import UnsplitGroup
from tests.modules import TrainedQwen, qwen_on_meta
from tests.ranks import Ranks, ranks
from tests.strategies.test_strategy import assert_close, parameters, plain_loop, rows, train


class Evaluated(TrainedQwen):
    """Looks at its logits between two backwards."""

    def logits_of(self, input_ids: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            return self(torch.tensor(input_ids)).logits


class Copying(Evaluated):
    """As torch leaves it."""

    def on_weights_materialized(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        for group in fsdp_groups(self):
            group.__class__ = FSDPParamGroup
        super().on_weights_materialized()


def trained(path: str, cls: type, **config: Any) -> dict[str, torch.Tensor]:
    """Three steps of two micro-batches each, with an evaluation between backward and step."""
    with ranks(1, qwen_on_meta(path, cls), **config) as engine:
        for step in range(3):
            train(engine, rows(2, step))
            engine.method("logits_of", rows(1))
            train(engine, rows(2, 10 + step))
            engine.method("optimizer_step")
        return parameters(engine)


@pytest.mark.parametrize(
    "config", [{}, {"bf16": True}, {"reshard_after_forward": False}, {"bf16": True, "use_mp_opt": True}]
)
def test_training_is_that_of_torchs_fsdp_bit_for_bit(qwen: str, config: dict[str, Any]) -> None:
    found, expected = trained(qwen, Evaluated, **config), trained(qwen, Copying, **config)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_a_pass_reads_the_shard_itself_and_its_gradient_becomes_the_shards(qwen: str) -> None:
    def places() -> Any:
        layer, held = module.model.layers[0].mlp.up_proj, {}  # type: ignore[name-defined]
        shard = layer.weight.to_local().data_ptr()
        hook = layer.register_forward_hook(lambda *_: held.update(weight=layer.weight))
        ids = torch.tensor([[1, 2, 3]])
        strategy.backward(module(ids).logits.sum(), module, module.optimizer)  # type: ignore[name-defined]
        hook.remove()
        kinds = {type(group).__name__ for group in fsdp_groups(module)}  # type: ignore[name-defined]
        outside = type(layer.weight).__name__, type(layer.weight.grad).__name__
        return held["weight"].data_ptr() == shard, held["weight"].grad, kinds, outside

    with ranks(1, qwen_on_meta(qwen)) as engine:
        same, gradient, kinds, outside = engine.run(places)[0]
    assert same and gradient is None
    assert kinds == {UnsplitGroup.__name__}
    assert outside == ("DTensor", "DTensor")


def test_casts_of_one_rank_are_not_reduced(qwen: str) -> None:
    def reductions() -> Any:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        layer, plain, seen = module.model.layers[0].mlp.up_proj, FSDPParamGroup.post_backward, []  # type: ignore[name-defined]
        FSDPParamGroup.post_backward = lambda group, *_: seen.append("reduced") or plain(group, *_)  # type: ignore[method-assign, func-returns-value]
        hook = layer.register_forward_hook(lambda *_: seen.append(layer.weight.dtype))
        try:
            for _ in range(2):
                logits = module(torch.tensor([[1, 2, 3]])).logits  # type: ignore[name-defined]
                strategy.backward(logits.sum(), module, module.optimizer)  # type: ignore[name-defined]
        finally:
            FSDPParamGroup.post_backward = plain  # type: ignore[method-assign]
            hook.remove()
        left = [group.fsdp_params[0].all_gather_outputs[0].untyped_storage().nbytes() for group in fsdp_groups(layer)]
        return seen, layer.weight.grad.dtype, left

    with ranks(1, qwen_on_meta(qwen), bf16=True) as engine:
        seen, gradient, left = engine.run(reductions)[0]
    assert seen == [torch.bfloat16] * 2
    assert gradient is torch.float32
    assert not any(left), "casts are freed after a pass"


def test_weights_that_moved_or_were_written_are_what_the_next_pass_reads(qwen: str) -> None:
    def moved() -> Any:
        ids = torch.tensor([[1, 2, 3]])
        with torch.no_grad():
            first = module(ids).logits  # type: ignore[name-defined]
            with torch.inference_mode():
                assert torch.equal(module(ids).logits, first)  # type: ignore[name-defined]
            strategy.offload_model(module)  # type: ignore[name-defined]
            strategy.reload_model(module)  # type: ignore[name-defined]
            again = module(ids).logits  # type: ignore[name-defined]
            state = {name: value.clone() for name, value in module.state_dict().items()}  # type: ignore[name-defined]
            for parameter in module.parameters():  # type: ignore[name-defined]
                parameter.to_local().mul_(1.5)
            changed = module(ids).logits  # type: ignore[name-defined]
            module.load_state_dict(state, assign=True)  # type: ignore[name-defined]
            back = module(ids).logits  # type: ignore[name-defined]
        return first, again, changed, back

    with ranks(1, qwen_on_meta(qwen)) as engine:
        first, again, changed, back = engine.run(moved)[0]
        assert torch.equal(first, again) and torch.equal(first, back)
        assert not torch.allclose(first, changed)
        train(engine, rows(2))
        assert engine.method("optimizer_step")[0]["stepped"]


class Partly(TrainedQwen):
    """Layers that do not train, and a hook of the user's on a gradient."""

    def on_weights_materialized(self) -> None:
        for parameter in self.model.layers[0].parameters():
            parameter.requires_grad_(False)
        self.heard = 0
        super().on_weights_materialized()

    def listen(self) -> None:
        self.model.norm.weight.register_post_accumulate_grad_hook(lambda _: self.count())

    def count(self) -> None:
        self.heard += 1

    def times(self) -> int:
        return self.heard


def test_frozen_layers_stay_and_hooks_on_gradients_are_called(qwen: str) -> None:
    with ranks(1, qwen_on_meta(qwen, Partly)) as engine:
        before = parameters(engine)
        engine.method("listen")
        train(engine, rows(2))
        engine.method("optimizer_step")
        after = parameters(engine)
        assert engine.method("times") == [1]
    for name, value in before.items():
        assert torch.equal(value, after[name]) == name.startswith("model.layers.0."), name


def test_a_rank_that_holds_a_replica_reduces_gradients_over_the_others(qwen: str) -> None:
    data = rows(4, 9)
    expected, _ = plain_loop(qwen, [[data]])

    def kinds() -> set[str]:
        return {type(group).__name__ for group in fsdp_groups(module)}  # type: ignore[name-defined]

    with ranks(2, qwen_on_meta(qwen), shard_size=1) as engine:
        train(engine, data)
        engine.method("optimizer_step")
        assert_close(parameters(engine), expected)
        assert engine.run(kinds) == [{UnsplitGroup.__name__}] * 2


def test_two_shards_stay_torchs(engine: Ranks) -> None:
    def kinds() -> set[str]:
        model = strategy.prepare_model(nn.Linear(4, 4), is_training=True)  # type: ignore[name-defined]
        return {type(group).__name__ for group in fsdp_groups(model)}

    assert engine.run(kinds) == [{"FSDPParamGroup"}] * 2


def test_parameters_that_move_or_freeze_between_passes_are_shown_as_they_are(qwen: str) -> None:
    def passes() -> Any:
        from rlbench.strategies.memory.offloading import reshard

        layer, seen = module.model.layers[0].mlp.up_proj, []  # type: ignore[name-defined]
        params = [p for group in fsdp_groups(module) for p in group.fsdp_params]  # type: ignore[name-defined]
        shown: list[tuple[int, bool]] = []
        hook = layer.register_forward_hook(
            lambda *_: shown.append((layer.weight.data_ptr(), layer.weight.requires_grad))
        )
        for change in ("", "", "move", "freeze", ""):
            if change == "move":
                own = layer.weight._local_tensor
                own.data = own.clone().mul_(2.0)
                next(p for p in params if p.sharded_param is layer.weight).reset_sharded_param()
            if change == "freeze":
                layer.weight.requires_grad_(False)
            with torch.no_grad():
                logits = module(torch.tensor([[1, 2, 3]])).logits  # type: ignore[name-defined]
            reshard(module)  # type: ignore[name-defined]
            place, trained = shown.pop()
            seen.append((place == layer.weight.to_local().data_ptr(), trained, float(logits.sum())))
        hook.remove()
        return seen, type(layer.weight).__name__

    with ranks(1, qwen_on_meta(qwen)) as engine:
        seen, kind = engine.run(passes)[0]
    where, trained, sums = zip(*seen, strict=True)
    assert where == (True,) * 5 and trained == (True, True, True, False, False) and kind == "DTensor"
    assert sums[0] == sums[1] != sums[2] == sums[3] == sums[4]
