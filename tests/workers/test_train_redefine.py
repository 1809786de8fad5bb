"""A live module gets other code: new methods, the same weights, optimizer and random state; all ranks or none."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

import rlbench.nn
from rlbench.dispatch import by_value
from rlbench.errors import EngineError, MethodError
from rlbench.rl import grpo
from tests.modules import RAGGED, Block, RunningMeanModel, TrainedQwen, batch_of, qwen_on_meta
from tests.ranks import RankFailure, Ranks, ranks

IDS = [[1, 2, 3, 4, 5]]
VERBS = ("build", "redefine", "cuda")


def redefine(engine: Ranks, cls: Any, replace: str | None = None) -> dict[str, Any]:
    found = engine.call("redefine", by_value.dumps(cls), by_value.identity(cls), replace, VERBS)
    assert all(one == found[0] for one in found)
    return found[0]


def add(engine: Ranks, fn: Any) -> dict[str, Any]:
    return engine.call("add_method", by_value.dumps(fn), by_value.identity(fn), VERBS)[0]


def state(engine: Ranks) -> list[dict[str, str]]:
    return engine.call("training_checksums")


def edited(scale: float) -> type:
    class TrainedQwen(rlbench.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
        def on_weights_materialized(self) -> None:
            self.optimizer = self.strategy.create_optimizer(self, lr=1e-2, weight_decay=0.0)

        def train_step(self, input_ids: list[list[int]]) -> float:
            """Edited."""
            ids = torch.tensor(input_ids)
            loss = scale * self(ids).logits.logsumexp(-1).mean()
            self.strategy.backward(loss, self, self.optimizer)
            return float(loss.detach())

        def optimizer_step(self) -> dict[str, Any]:
            return dict(self.strategy.optimizer_step(self.optimizer, self, None))

        def fresh(self) -> str:
            return f"{type(self).__name__} {scale}"

    return TrainedQwen


@pytest.mark.parametrize("world", [1, 2])
def test_methods_change_and_nothing_else(qwen: str, world: int) -> None:
    with ranks(world, qwen_on_meta(qwen)) as engine:
        engine.method("train_step", IDS)
        engine.method("optimizer_step")
        before = state(engine)
        done = redefine(engine, edited(1.0))
        assert done["changed"] and done["modules"] == 1 and done["notes"] == []
        assert {"fresh", "train_step"} < {info["name"] for info in done["methods"]}
        assert "where" not in {info["name"] for info in done["methods"]}
        assert state(engine) == before
        assert engine.method("fresh") == ["FSDPTrainedQwen 1.0"] * world
        with pytest.raises(MethodError, match="no method 'where'"):
            engine.method("where")
        one = engine.method("train_step", IDS)[0]
        engine.call("policy_zero_grad")
        redefine(engine, edited(3.0))
        assert engine.method("train_step", IDS)[0] == pytest.approx(3 * one, rel=1e-6)
        assert engine.method("optimizer_step")[0]["stepped"]
        assert state(engine) != before


def test_a_redefined_module_trains_bit_for_bit_as_one_built_from_that_class(qwen: str) -> None:
    def trained(engine: Ranks) -> Any:
        engine.call("policy_forward_backward", batch_of(RAGGED), cloudpickle.dumps(grpo()), {})
        engine.call("policy_optim_step", {})
        return state(engine)

    with ranks(2, qwen_on_meta(qwen)) as engine:
        expected = trained(engine)
    with ranks(2, qwen_on_meta(qwen)) as engine:
        engine.call("policy_forward_backward", batch_of(RAGGED), cloudpickle.dumps(grpo()), {})
        engine.call("policy_zero_grad")
        redefine(engine, edited(1.0))
        assert trained(engine) == expected


def test_the_same_class_again_changes_nothing_and_another_replaces_it(qwen: str) -> None:
    with ranks(2, qwen_on_meta(qwen)) as engine:
        assert redefine(engine, edited(1.0))["changed"]
        assert not redefine(engine, edited(1.0))["changed"]
        assert redefine(engine, edited(2.0))["changed"]
        for scale in range(3, 9):
            redefine(engine, edited(float(scale)))
        depth = engine.run(lambda: len(type(module).__mro__))[0]  # type: ignore[name-defined]
        redefine(engine, edited(1.0))
        assert engine.run(lambda: len(type(module).__mro__))[0] == depth  # type: ignore[name-defined]


def doubled(cls: type = RunningMeanModel) -> type:
    class RunningMeanModel(cls):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Tensor) -> Tensor:
            return 2 * super().forward(input_ids)

    return RunningMeanModel


def test_another_forward_is_the_one_that_log_probs_come_from() -> None:
    source = {name: torch.randn(p.shape) for name, p in RunningMeanModel().named_parameters()}
    batch = batch_of(RAGGED)

    def on_meta() -> Any:
        with rlbench.nn.device("meta"):
            return RunningMeanModel(source=source)

    def scored(engine: Ranks) -> Any:
        return engine.call("policy_forward", batch, {"packing": False})[0]["channels"]["entropy"][0]

    with ranks(2, on_meta()) as engine:
        plain = scored(engine)
        redefine(engine, doubled())
        sharper = scored(engine)
        with pytest.raises(EngineError, match=r"call self\(...\)"):
            engine.run(lambda: module.forward(torch.tensor([[1]])))  # type: ignore[name-defined]
    assert sharper.mean() < plain.mean() and not (sharper == plain).all()


def sharper_logits() -> type:
    class TrainedQwen(rlbench.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
        def forward(
            self,
            input_ids: Any = None,
            position_ids: Any = None,
            use_cache: Any = None,
            logits_to_keep: Any = 0,
            **more: Any,
        ) -> Any:
            output = super().forward(
                input_ids, position_ids=position_ids, use_cache=use_cache, logits_to_keep=logits_to_keep, **more
            )
            output.logits = 2 * output.logits
            return output

    return TrainedQwen


def test_how_log_probs_come_about_is_looked_at_again(qwen: str) -> None:
    given = batch_of(RAGGED)
    with ranks(2, qwen_on_meta(qwen)) as engine:
        assert engine.call("policy_forward_backward", given, cloudpickle.dumps(grpo()), {})[0]["head"] == "chunked"
        redefine(engine, sharper_logits())
        done = engine.call("policy_forward_backward", given, cloudpickle.dumps(grpo()), {})[0]
        assert done["head"] == "plain: the model changes its logits after the output layer"


def quiet_block() -> type:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    return Block


def test_classes_inside_the_module_are_redefined_by_name() -> None:
    source = {n: torch.ones(p.shape) for n, p in RunningMeanModel().named_parameters()}
    with rlbench.nn.device("meta"):
        made = RunningMeanModel(source=source)
    assert isinstance(made.blocks[0], Block)
    with ranks(2, made) as engine:
        before = state(engine)
        done = redefine(engine, quiet_block())
        assert done["changed"] and done["modules"] == 2
        assert any("Block.__init__ changed and is not run" in note for note in done["notes"])
        assert state(engine) == before
        batch = batch_of(RAGGED)
        engine.call("policy_forward", batch, {"packing": False})
        kinds = engine.run(lambda: [type(m).__name__ for m in module.blocks])  # type: ignore[name-defined]
        assert kinds == [["FSDPBlock", "FSDPBlock"]] * 2


def test_a_part_of_the_architecture_may_be_redefined_by_a_subclass_of_it(qwen: str) -> None:
    def louder() -> type:
        class Qwen2MLP(base):  # type: ignore[misc, valid-type]
            def forward(self, x: Tensor) -> Tensor:
                return 2 * super().forward(x)

        return Qwen2MLP

    base = Qwen2MLP
    with ranks(2, qwen_on_meta(qwen)) as engine:
        batch = batch_of(RAGGED)
        before = engine.call("policy_forward", batch, {})[0]["channels"]["logprobs"][0]
        assert redefine(engine, louder())["modules"] == 2
        after = engine.call("policy_forward", batch, {})[0]["channels"]["logprobs"][0]
        assert abs(before - after).max() > 1e-3


# -- what is refused


class Wider(rlbench.nn.Fsdp2TrainModule):
    """With another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 16)
        self.extra = nn.Linear(3, 3)


class NoSuchPlace(rlbench.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    pass


class Shadowing(TrainedQwen):
    def build(self) -> None: ...


class OwnRank(TrainedQwen):
    def rank(self) -> int:  # type: ignore[override]
        return 3


class HidesLayers(TrainedQwen):
    def lm_head(self) -> None: ...


class OtherBase(rlbench.nn.Fsdp2TrainModule):
    pass


class DeeperQwen(TrainedQwen):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.extra = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("cls", "replace", "said"),
    [
        (NoSuchPlace, None, r"no part of the live module is a 'NoSuchPlace'.*replace="),
        (Shadowing, "TrainedQwen", "defines build"),
        (OwnRank, "TrainedQwen", "defines rank"),
        (HidesLayers, "TrainedQwen", "defines lm_head"),
        (OtherBase, "TrainedQwen", "does not inherit from .*Qwen2ForCausalLM"),
        (DeeperQwen, "TrainedQwen", "parameters of the new DeeperQwen do not fit.*'extra.weight'"),
        (int, None, "redefine takes a class of a torch module"),
        (nn.Linear, "Qwen2MLP", "does not inherit from Qwen2MLP"),
    ],
)
def test_what_cannot_take_the_place_is_refused_on_all_ranks(
    qwen: str, cls: type, replace: str | None, said: str
) -> None:
    with ranks(2, qwen_on_meta(qwen)) as engine:
        before = state(engine)
        found = engine.outcomes("redefine", [(by_value.dumps(cls), "x", replace, VERBS)] * 2)
        assert all(isinstance(one, RankFailure) for one in found)
        with pytest.raises(EngineError, match=said):
            raise found[0].error
        assert state(engine) == before
        assert engine.run(lambda: type(module).__name__) == ["FSDPTrainedQwen"] * 2  # type: ignore[name-defined]
        assert engine.method("where")[0][1] == 2


def test_a_refusal_on_one_rank_alone_changes_none(qwen: str) -> None:
    cls = edited(1.0)
    good, bad = by_value.dumps(cls), b"no pickle"
    with ranks(2, qwen_on_meta(qwen)) as engine:
        found = engine.outcomes("redefine", [(good, "x", None, VERBS), (bad, "x", None, VERBS)])
        assert all(isinstance(one, RankFailure) for one in found)
        assert "failed on rank 1" in str(found[0].error) and "cannot be rebuilt" in str(found[1].error)
        assert engine.method("where")[0][0] == 0
        with pytest.raises(MethodError):
            engine.method("fresh")


# -- one method


def test_a_method_is_added_edited_and_outlives_a_redefinition_that_lacks_it(qwen: str) -> None:
    def norm(self: Any, times: float = 1.0) -> float:
        return times * self.world_size

    def norm_edited(self: Any) -> str:
        return "edited"

    norm_edited.__name__ = "norm"
    with ranks(2, qwen_on_meta(qwen)) as engine:
        before = state(engine)
        done = add(engine, norm)
        assert {"name": "norm", "signature": "(times: 'float' = 1.0) -> 'float'", "doc": None} in done["methods"]
        assert engine.method("norm", times=2.0) == [4.0, 4.0] and engine.method("where")[0][0] == 0
        assert not add(engine, norm)["changed"]
        redefine(engine, edited(1.0))
        assert engine.method("norm") == [2.0, 2.0] and engine.method("fresh")[0].endswith("1.0")
        assert add(engine, norm_edited)["changed"] and engine.method("norm") == ["edited"] * 2
        assert not redefine(engine, edited(1.0))["changed"]
        depth = engine.run(lambda: len(type(module).__mro__))  # type: ignore[name-defined]
        for _ in range(3):
            add(engine, norm)
            add(engine, norm_edited)
        assert engine.run(lambda: len(type(module).__mro__)) == depth  # type: ignore[name-defined]
        assert state(engine) == before


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (len, "made of a function with a name"),
        (lambda self: 1, "made of a function with a name"),
        (TrainedQwen, "made of a function with a name"),
    ],
)
def test_what_is_no_method_is_refused(qwen: str, fn: Any, said: str) -> None:
    with ranks(1, qwen_on_meta(qwen)) as engine, pytest.raises(EngineError, match=said):
        add(engine, fn)


HIDDEN = [
    ("build", "method of the engine"),
    ("parameters", "method of Module"),
    ("generate", "method of .*Mixin"),
    ("model", "part or an attribute"),
    ("optimizer", "part or an attribute"),
    ("rank", "method of BaseTrainModule"),
]


@pytest.mark.parametrize(("name", "whose"), HIDDEN)
def test_a_method_may_not_hide_one_that_is_there(qwen: str, name: str, whose: str) -> None:
    def fn(self: Any) -> int:
        return 1

    fn.__name__ = name
    with ranks(1, qwen_on_meta(qwen)) as engine:
        with pytest.raises(EngineError, match=f"{name!r} is a .*{whose}"):
            add(engine, fn)
        assert len(engine.run(lambda: list(module.parameters()))[0]) > 1  # type: ignore[name-defined]


def test_a_method_needs_a_place_for_the_module(qwen: str) -> None:
    def lonely() -> int:
        return 1

    with ranks(1, qwen_on_meta(qwen)) as engine:
        with pytest.raises(EngineError, match="takes no argument"):
            add(engine, lonely)
        assert add(engine, staticmethod(lonely))["changed"] and engine.method("lonely") == [1]
