"""`prepare_model` and what follows from it, on two ranks: forms, units, ties, empty models, options of sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlbench.errors import BuildError, EngineError
from rlbench.strategies import FSDPV2Strategy, manual_transformer_cls_names_to_wrap
from tests.modules import save_qwen
from tests.ranks import Ranks
from tests.strategies.surface import (
    assert_close,
    language_loss,
    rows,
    run_steps,
    said_by,
    share,
    state_of,
    train_by_hand,
    whole,
)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen(tmp_path_factory.mktemp("untied"), tied=False)


class Mixer(nn.Module):
    """A class that nothing names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_the_optimizer_of_a_pair_steps_the_sharded_parameters_and_keeps_its_state(qwen: str, engine: Ranks) -> None:
    """One step before sharding, two after: as three steps in one process."""
    steps = [[rows(4, seed)] for seed in range(3)]

    def pair() -> Any:
        s = FSDPV2Strategy(bf16=False)
        model = Qwen2ForCausalLM.from_pretrained(qwen)
        plain = [p for n, p in model.named_parameters() if "bias" in n or "norm" in n]
        decayed = [p for n, p in model.named_parameters() if not ("bias" in n or "norm" in n)]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
        )
        language_loss(model, steps[0][0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        prepared, same = s.prepare_model((model, optimizer))
        run_steps(s, prepared, same, steps[1:])
        held = {id(p) for g in same.param_groups for p in g["params"]}
        return (
            same is optimizer,
            held == {id(p) for p in prepared.parameters()},
            whole(dict(prepared.named_parameters())),
            state_of(prepared, same),
        )

    same, holds, parameters, state = engine.run(pair)[0]
    expected = train_by_hand(qwen, steps)
    assert same and holds
    assert_close(parameters, expected["parameters"])
    assert_close(state, expected["state"])


def test_lists_tuples_pairs_and_what_is_no_module_come_back_in_their_form(qwen: str, engine: Ranks) -> None:
    def forms() -> Any:
        s = FSDPV2Strategy(bf16=False)
        made = [nn.Linear(4, 4) for _ in range(4)]
        optimizer = torch.optim.SGD(made[3].parameters(), lr=1.0)
        found = s.prepare_model([made[0], (made[1], None), "a remote reward", (made[3], optimizer, "scheduler")])
        again = s.prepare_model(made[0])
        assert s.prepare(made[0]) is found[0] and s.prepare(made[0], found[3][:2], is_rlhf=True)[1] == found[3][:2]
        return (
            [type(part).__name__ for part in found],
            s.prepare_model(None),
            found[2],
            found[3][2],
            [isinstance(m, FSDPModule) for m in (found[0], found[1][0], found[3][0], made[2])],
            again is found[0],
            found[1][1],
            found[3][0].weight.requires_grad,
        )

    kinds, none, url, scheduler, sharded, same, nothing, _ = engine.run(forms)[0]
    assert kinds == ["FSDPLinear", "tuple", "str", "tuple"]
    assert (none, url, scheduler, nothing, same) == (None, "a remote reward", "scheduler", None, True)
    assert sharded == [True, True, True, False]


def test_an_optimizer_of_another_model_is_refused(qwen: str, engine: Ranks) -> None:
    def strange() -> None:
        s = FSDPV2Strategy(bf16=False)
        s.prepare_model((nn.Linear(4, 4), torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=1.0)))

    with pytest.raises(EngineError, match=r"steps a parameter of shape \(3, 3\) that FSDPLinear does not have"):
        engine.run(strange)


def test_classes_are_units_by_the_list_and_a_tied_embedding_stays_with_its_twin(
    qwen: str, untied: str, engine: Ranks
) -> None:
    def prepared(path: str) -> Any:
        s = FSDPV2Strategy(bf16=False)
        model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(path), True)
        units = sorted(type(m).__name__ for m in model.modules() if isinstance(m, FSDPModule))
        run_steps(s, model, s.create_optimizer(model, lr=1e-2), [[rows(4)]])
        return units, model.lm_head.weight is model.model.embed_tokens.weight

    layers = ["FSDPQwen2DecoderLayer"] * 2 + ["FSDPQwen2ForCausalLM"]
    assert engine.run(prepared, untied)[0] == (["FSDPEmbedding", *layers], False)
    assert engine.run(prepared, qwen)[0] == (layers, True)


def test_a_name_added_to_the_list_makes_units_of_its_class(qwen: str, engine: Ranks) -> None:
    assert "LlamaDecoderLayer" in manual_transformer_cls_names_to_wrap

    def units() -> Any:
        from rlbench.strategies.fsdp2 import manual_transformer_cls_names_to_wrap as names

        s, counts = FSDPV2Strategy(bf16=False), []
        for extra in ([], ["Mixer"]):
            names.extend(extra)
            model = s.prepare_model(nn.Sequential(Mixer(), Mixer()))
            counts.append(sum(isinstance(part, FSDPModule) for part in model.modules()))
            del names[len(names) - len(extra) :]
        return counts

    assert engine.run(units)[0] == [1, 3]


@pytest.mark.parametrize(("size", "local"), [(-1, 2), (2, 2), (1, 4), ("auto", 4)])
def test_shard_size_says_over_how_many_ranks_and_auto_keeps_a_small_untrained_model_whole(
    qwen: str, engine: Ranks, size: Any, local: int
) -> None:
    def rows_here() -> Any:
        s = FSDPV2Strategy(bf16=False)
        held = s.prepare_model(nn.Linear(4, 4), shard_size=size).weight.to_local().shape[0]
        return held, s.prepare_model(nn.Linear(4, 4), True, "auto").weight.to_local().shape[0]

    assert engine.run(rows_here) == [(local, 2)] * 2


def test_a_shard_size_that_does_not_divide_the_ranks_is_refused(qwen: str, engine: Ranks) -> None:
    def eight() -> None:
        FSDPV2Strategy(bf16=False).prepare_model(nn.Linear(4, 4), shard_size=8)

    with pytest.raises(BuildError, match="shard_size=8 does not divide 2 ranks"):
        engine.run(eight)


def test_reshard_after_forward_false_keeps_layers_gathered_until_the_backward(qwen: str, engine: Ranks) -> None:
    def gathered(reshard: bool) -> Any:
        s = FSDPV2Strategy(bf16=False)
        model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), True, reshard_after_forward=reshard)
        loss = language_loss(model, share(rows(4), s))
        after_forward = isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
        loss.backward()
        return after_forward, isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)

    assert engine.run(gathered, True)[0] == (True, True)
    assert engine.run(gathered, False)[0] == (False, True)


def test_a_model_made_without_memory_has_its_buffers_and_gets_its_weights(qwen: str, engine: Ranks) -> None:
    """Defects absent: torch.device("meta") emptied RoPE's buffers, and to_empty left weights as memory had them."""

    def meta() -> Any:
        s = FSDPV2Strategy(bf16=False)
        with s.init_model_context(meta_init=True):
            model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(qwen))
        model.name_or_path = qwen
        empty = {p.is_meta for p in model.parameters()}, {b.is_meta for b in model.buffers()}
        prepared = s.prepare_model(model.eval(), True)
        with s.init_model_context():
            reference = Qwen2ForCausalLM.from_pretrained(qwen)
        with torch.no_grad():
            ids = torch.tensor(rows(2))
            return empty, float((prepared(ids).logits - reference(ids).logits).abs().max())

    (parameters, buffers), difference = engine.run(meta)[0]
    assert parameters == {True} and buffers == {False}
    assert difference < 1e-5


def test_a_model_without_memory_that_names_no_source_is_said_and_stays_empty(qwen: str, engine: Ranks) -> None:
    def no_source() -> Any:
        s = FSDPV2Strategy(bf16=False)
        with s.init_model_context(meta_init=True):
            model = nn.Linear(4, 4)
        prepared, said = said_by(lambda: s.prepare_model(model))
        return said, prepared.weight.is_meta

    said, is_meta = engine.run(no_source)[0]
    assert "FSDPLinear has no memory" in said and "load_ckpt" in said and is_meta


def test_fsdp_cpu_offload_keeps_trained_weights_on_the_host_and_switches_adam_offload_off(
    qwen: str, engine: Ranks
) -> None:
    """On a host without a GPU the weights are there anyway; what acts is FSDP's own policy, with the same numbers."""

    def offloaded() -> Any:
        from torch.distributed.fsdp import CPUOffloadPolicy

        s = FSDPV2Strategy(bf16=False, args={"fsdp_cpu_offload": True, "adam_offload": True})
        model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), True)
        reference = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen))
        policies = [
            isinstance(m._get_fsdp_state()._fsdp_param_group.offload_policy, CPUOffloadPolicy)
            for m in (model, reference)
        ]
        optimizer = s.create_optimizer(model, lr=1e-2, weight_decay=0.1)
        run_steps(s, model, optimizer, [[rows(4)]])
        s.maybe_offload_optimizer(optimizer)
        run_steps(s, model, optimizer, [[rows(4, 1)]])  # not offloaded: it lives on the host already
        return policies, s.config.adam_offload, whole(dict(model.named_parameters()))

    policies, adam_offload, parameters = engine.run(offloaded)[0]
    assert policies == [True, False] and adam_offload is False
    assert_close(parameters, train_by_hand(qwen, [[rows(4)], [rows(4, 1)]])["parameters"])


def test_half_precision_weights_are_held_in_float32_only_where_they_train(qwen: str, engine: Ranks) -> None:
    def dtypes() -> Any:
        s = FSDPV2Strategy()
        made = [Qwen2ForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16) for _ in range(2)]
        prepared = [s.prepare_model(made[0], True), s.prepare_model(made[1], False)]
        return [str(next(model.parameters()).dtype) for model in prepared]

    assert engine.run(dtypes)[0] == ["torch.float32", "torch.bfloat16"]


def test_a_prepared_model_generates_what_it_did_before(qwen: str, engine: Ranks) -> None:
    def generated(sharded: bool) -> Any:
        model = Qwen2ForCausalLM.from_pretrained(qwen)
        if sharded:
            model = FSDPV2Strategy(bf16=False).prepare_model(model)
        return model.generate(torch.tensor(rows(2)), max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()

    assert engine.run(generated, True) == engine.run(generated, False)


def test_all_models_of_a_trainer_are_prepared_with_their_rates(qwen: str, engine: Ranks) -> None:
    def prepared(critic_pretrain: Any, remote: Any) -> Any:
        s = FSDPV2Strategy(
            bf16=False,
            args={
                "actor_learning_rate": 4e-3,
                "critic_learning_rate": 8e-3,
                "adam_betas": (0.8, 0.9),
                "l2": 0.5,
                "lr_warmup_ratio": 0.2,
                "critic_pretrain": critic_pretrain,
                "remote_rm_url": remote,
            },
        )
        models = [Qwen2ForCausalLM.from_pretrained(qwen) for _ in range(4)]
        actor, critic, rewards, initial = s.prepare_models_and_optimizers(
            models[0], models[1], [models[2]], models[3], None, 10
        )
        rates = []
        for _ in range(10):
            rates.append(actor[1].param_groups[0]["lr"])
            actor[1].step()
            actor[2].step()
        return (
            rates,
            actor[1].param_groups[0]["betas"],
            {g["weight_decay"] for g in actor[1].param_groups},
            critic[1] and critic[1].defaults["lr"],
            isinstance(rewards[0], FSDPModule),
            isinstance(initial, FSDPModule),
            actor[1].param_groups[0]["lr"],
        )

    rates, betas, decays, critic, reward, initial, last = engine.run(prepared, "a/critic", None)[0]
    assert rates[:3] == pytest.approx([2e-3, 4e-3, 4e-3]) and last == pytest.approx(4e-4)
    assert (tuple(betas), decays, critic, reward, initial) == ((0.8, 0.9), {0.5, 0.0}, 8e-3, True, True)
    assert engine.run(prepared, False, "a remote reward")[0][3:6] == (None, False, True)
