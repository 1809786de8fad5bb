"""Trainers over models that FSDP1 holds: steps of FSDP2's; a script's models made without memory; an engine of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from rlbench.errors import EngineError
from rlbench.trainers import SPMDPPOTrainer, make_critic
from tests.modules import qwen_on_meta
from tests.ranks import ranks
from tests.strategies.flat_modules import KINDS, FlatQwen
from tests.trainers.making import LONGEST, TableEngine, asked, last_token, qwen_of
from tests.trainers.small_trainer import OPTIONS

pytestmark = pytest.mark.slow


def fitted(path: str, kind: str, method: str) -> Any:
    """Two iterations of a trainer on models that a script prepares."""
    from rlbench.strategies import FSDPV2Strategy
    from rlbench.strategies.fsdp1 import FSDP1Strategy

    own = {"ppo": {"advantage_estimator": "gae"}, "grpo": {"packing": True, "head": "chunked"}}[method]
    made = {"fsdp1": FSDP1Strategy, "fsdp2": FSDPV2Strategy}[kind]
    s: Any = made(bf16=False, max_norm=0.5, args={**OPTIONS, **own})
    s.gather_and_generate = TableEngine()
    s.update_engine_weights = lambda actor: {"version": 1}
    actor = s.prepare_model(qwen_of(path), is_training=True)
    reference = s.prepare_model(qwen_of(path))
    critic = critic_optim = None
    if method == "ppo":
        critic = s.prepare_model(make_critic(path), is_training=True)
        critic_optim = s.create_optimizer(critic, lr=1e-3, weight_decay=0.0)
    trainer = SPMDPPOTrainer(
        s,
        actor,
        critic,
        last_token,
        reference,
        None,
        s.create_optimizer(actor, lr=1e-3, weight_decay=0.0),
        critic_optim,
        prompts=asked(40),
        rollout_batch_size=4,
        max_tokens=LONGEST,
        prompt_max_len=16,
        kl_coef=0.1,
        gradient_checkpointing=method == "ppo",
    )
    found = trainer.fit(max_steps=2)
    names = ("policy_loss", "critic_loss", "actor_grad_norm", "critic_grad_norm", "rollout_ref_kl")
    return [{name: one[name] for name in names if name in one} for one in found]


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_trainer_takes_the_steps_it_takes_with_fsdp2(qwen: str, method: str) -> None:
    found = {}
    for kind, cls in KINDS.items():
        with ranks(2, qwen_on_meta(qwen, cls), executor=kind) as engine:
            here, there = engine.run(fitted, qwen, kind, method)
            assert here == there
            found[kind] = here
    assert [pytest.approx(one, abs=1e-5) for one in found["fsdp2"]] == found["fsdp1"]
    assert found["fsdp1"][0] != found["fsdp1"][1] and all(one["actor_grad_norm"] > 0 for one in found["fsdp1"])


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_a_model_is_prepared_also_inside_of_the_context_it_was_made_in(qwen: str, kind: str) -> None:
    def work() -> Any:
        s = strategy  # type: ignore[name-defined]
        with s.init_model_context(meta_init=True):
            model = AutoModelForCausalLM.from_pretrained(qwen)
            assert next(model.parameters()).is_meta
            prepared = s.prepare_model(model, is_training=True)
            assert torch.nn.Linear(2, 2).weight.is_meta  # what is made afterwards is without memory again
        logits = prepared(torch.arange(5)[None]).logits.detach()
        return logits, torch.nn.Linear(2, 2).weight.is_meta

    plain = Qwen2ForCausalLM.from_pretrained(qwen)(torch.arange(5)[None]).logits.detach()
    with ranks(2, qwen_on_meta(qwen, KINDS[kind]), executor=kind) as engine:
        for logits, on_meta in engine.run(work):
            torch.testing.assert_close(logits, plain, rtol=0, atol=1e-5)
            assert not on_meta


def test_a_model_that_the_other_fsdp_holds_is_refused_by_name(qwen: str) -> None:
    def work() -> Any:
        from rlbench.strategies import FSDPV2Strategy, get_strategy

        own, other = strategy, FSDPV2Strategy(bf16=False)  # type: ignore[name-defined]
        assert own.prepare_model(module) is module  # type: ignore[name-defined]
        elsewhere = other.prepare_model(qwen_of(qwen), is_training=True)
        said = []
        for wrong, model in ((other, module), (own, elsewhere)):  # type: ignore[name-defined]
            for use in (wrong.prepare_model, wrong.create_optimizer, lambda m, s=wrong: s.backward(loss_of(m), m)):
                with pytest.raises(EngineError) as caught:
                    use(model)
                said.append(str(caught.value))
        assert isinstance(get_strategy({"fsdp": True, "bf16": False, "train_batch_size": 8}), FSDPV2Strategy)
        return said

    def loss_of(model: Any) -> torch.Tensor:
        return torch.zeros((), requires_grad=True)

    with ranks(2, qwen_on_meta(qwen, FlatQwen), executor="fsdp1") as engine:
        said = engine.run(work)[0]
    assert len(said) == 6
    for one in said[:3]:
        assert one.startswith("FSDP1 holds FlatQwen: prepare and train it by the rank's own strategy")
    for one in said[3:]:
        assert re.match("FSDP2 holds .*Qwen2ForCausalLM, and the strategy of these ranks is FSDP1's", one)
