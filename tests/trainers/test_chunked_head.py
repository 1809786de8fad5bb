"""The output layer that gives log-probs itself: the plain path's numbers and gradients, or the plain path."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlbench.errors import DataError, EngineError
from rlbench.nn.lora import inject
from rlbench.rl import grpo
from rlbench.trainers.passes.chunked_head import token_bytes
from rlbench.trainers.passes.cost import PassPlan, pass_cost
from rlbench.trainers.passes.forward import PolicyModel, as_batch
from rlbench.trainers.update.options import LEAST_BUDGET, MOST_BUDGET, PolicyOptions
from tests.modules import RAGGED, VOCAB, RunningMeanModel, TrainedQwen, batch_of, qwen_on_meta, save_qwen
from tests.ranks import Ranks, ranks

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

WIDE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""The proportions of a Qwen2.5-0.5B."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    return {tied: save_qwen(tmp_path_factory.mktemp("qwen"), tied=tied) for tied in (True, False)}


def run(
    model: nn.Module, head: str, packed: bool = True, half: bool = False
) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Log-probs and entropies, and the gradients of a mix of both."""
    model.zero_grad()
    policy = PolicyModel(model, CPU, half=half)
    with policy.stats(batch_of(RAGGED), 0.8, packed, head) as (found, _):
        logprobs, entropy = found.logprobs, found.entropy
        weights = torch.linspace(-1, 1, len(logprobs))
        ((logprobs * weights).sum() + 0.3 * (entropy * weights.flip(0)).sum()).backward()
    values = torch.stack([logprobs, entropy]).detach().numpy()
    return values, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], error: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        gap = float((found[name] - wanted[name]).norm() / wanted[name].norm())
        assert gap <= error, f"{name}: {gap}"


# -- one process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_values_and_gradients_are_the_plain_paths(folders: dict[bool, str], tied: bool, packed: bool) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folders[tied])
    found, wanted = run(model, "chunked", packed), run(model, "plain", packed)
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)
    assert_same(found[1], wanted[1])
    assert "forward" not in vars(model.lm_head)


def test_a_bias_of_the_head_counts(folders: dict[bool, str]) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folders[False])
    model.lm_head.bias = nn.Parameter(torch.randn(VOCAB))
    found, wanted = run(model, "chunked"), run(model, "plain")
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)
    assert_same(found[1], wanted[1])
    assert "lm_head.bias" in found[1]


def test_by_default_no_logits_are_made(folders: dict[bool, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folders[True])
    policy, batch = PolicyModel(model, CPU, half=False), batch_of(RAGGED)
    assert policy.head_used(True) == "unknown"
    policy.prove(batch, True)
    shapes = []
    real = model.forward

    def seen(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        shapes.append(tuple(output.logits.shape))
        return output

    monkeypatch.setattr(model, "forward", seen)
    with policy.stats(batch, 1.0, True):
        pass
    assert shapes == [(1, len(batch.responses.values), 2)] and policy.head_used(True) == "chunked"


def test_the_proof_leaves_the_mode_of_each_part_and_no_gradient(folders: dict[bool, str]) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folders[True]).train()
    model.model.norm.eval()
    before = {name: part.training for name, part in model.named_modules()}
    policy = PolicyModel(model, CPU, half=False)
    policy.prove(batch_of(RAGGED), True, "plain")
    policy.prove(batch_of(RAGGED), True)
    assert {name: part.training for name, part in model.named_modules()} == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_response_without_tokens_gives_gradients_of_zero(folders: dict[bool, str]) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folders[False])
    empty = as_batch([np.zeros(1, np.int32)])
    policy = PolicyModel(model, CPU, half=False)
    assert policy.prove(batch_of(RAGGED), True, "chunked") is not None
    with policy.stats(empty, 1.0, True) as (found, _):
        logprobs, entropy = found.logprobs, found.entropy
        assert logprobs.shape == entropy.shape == (0,)
        (logprobs.sum() + entropy.sum()).backward()
    assert float(model.lm_head.weight.grad.abs().sum()) == 0.0


# -- models that need their logits ---------------------------------------------------------------------------


class DoubledLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class InPlace(Qwen2ForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits.mul_(1.0)
        return output


def softcapped() -> nn.Module:
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=1e6))


def scaled() -> nn.Module:
    return CohereForCausalLM(CohereConfig(**SMALL, logit_scale=1.0))


def adapted(path: str) -> nn.Module:
    model = Qwen2ForCausalLM.from_pretrained(path)
    head = DoubledLinear(32, VOCAB, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    return model


def hooked(path: str) -> nn.Module:
    model = Qwen2ForCausalLM.from_pretrained(path)
    model.lm_head.register_forward_hook(lambda module, given, out: 2 * out)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: softcapped(), "changes its logits"),  # by less than a comparison of values would see
        (lambda path: scaled(), "changes its logits"),
        (lambda path: InPlace.from_pretrained(path), "changes its logits"),
        (adapted, "DoubledLinear"),
        (hooked, "has a hook"),
        (lambda path: RunningMeanModel(), "get_output_embeddings"),
    ],
)
def test_a_model_that_does_more_than_its_head_runs_plain_and_says_why(
    folders: dict[bool, str], make: Any, reason: str
) -> None:
    torch.manual_seed(0)
    model = make(folders[False]).eval()
    policy, batch = PolicyModel(model, CPU, half=False), batch_of(RAGGED)
    with pytest.warns(UserWarning, match=reason), policy.stats(batch, 1.0, False) as (found, _):
        pass
    assert reason in policy.head_used(False) and policy.head_used(False).startswith("plain")
    with policy.stats(batch, 1.0, False, "plain") as (wanted, _):
        pass
    torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=0, atol=0)
    with (
        pytest.raises(EngineError, match=f"head='chunked'.*{reason}"),
        policy.stats(batch, 1.0, False, "chunked"),
    ):
        pass


def test_a_head_changed_after_the_proof_is_noticed(folders: dict[bool, str]) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folders[True]).eval()
    policy, batch = PolicyModel(model, CPU, half=False), batch_of(RAGGED)
    policy.prove(batch, True)
    handle = model.lm_head.register_forward_hook(lambda module, given, out: 2 * out)
    with pytest.raises(EngineError, match="changes its logits"), policy.stats(batch, 1.0, True):
        pass
    handle.remove()
    assert "forward" not in vars(model.lm_head)


# -- options -------------------------------------------------------------------------------------------------


def test_an_unknown_head_is_refused() -> None:
    with pytest.raises(DataError, match="head='chunkd'; nearest: chunked"):
        PolicyOptions(head="chunkd")


def test_the_budget_follows_the_logits_or_the_activations_or_what_is_given() -> None:
    options = PolicyOptions()
    assert options.budget(150_000) == (2 << 30) // (12 * 150_000)
    assert options.budget(150_000, token_bytes=1 << 20) == 4096
    assert options.budget(150_000, token_bytes=1) == MOST_BUDGET
    assert options.budget(150_000, token_bytes=1 << 40) == LEAST_BUDGET
    assert PolicyOptions(token_budget=7).budget(150_000, token_bytes=1) == 7


def test_the_budget_grows_with_the_memory_of_a_gpu_beyond_32_gib() -> None:
    options = PolicyOptions()
    assert options.budget(150_000, token_bytes=2 << 20, memory=24 << 30) == options.budget(150_000, token_bytes=2 << 20)
    assert options.budget(150_000, token_bytes=2 << 20, memory=80 << 30) == (10 << 30) // (2 << 20)
    assert options.budget(150_000, memory=80 << 30) == (5 << 30) // (12 * 150_000)
    assert PolicyOptions(token_budget=7).budget(150_000, token_bytes=1, memory=80 << 30) == 7


def test_a_token_holds_less_with_gradient_checkpointing_and_in_half(folders: dict[bool, str]) -> None:
    model = Qwen2ForCausalLM.from_pretrained(folders[True])
    full = PolicyModel(model, CPU, half=False).token_bytes
    assert PolicyModel(model, CPU, half=True).token_bytes == full // 2
    model.gradient_checkpointing_enable()
    assert PolicyModel(model, CPU, half=False).token_bytes < full


@pytest.mark.parametrize("adapters", [{}, {"rank": 8, "dropout": 0.0}, {"rank": 64, "dropout": 0.05}], ids=str)
def test_what_a_token_holds_is_near_what_its_pass_does(adapters: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**WIDE)).bfloat16()
    if adapters:
        inject(model, alpha=16, targets=["all-linear"], **adapters)
        model.bfloat16()
    plan = PassPlan((256,) * 4, gpu=True, copied=frozenset(), reduced=False)
    held = pass_cost(model, plan).owners["activations"] / sum(plan.lengths)
    assert held == pytest.approx(token_bytes(model, 2), rel=0.25)


def test_the_layers_of_a_gpt2_hold_their_tokens_too() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=64))
    assert token_bytes(model, 4) == int(1.5 * 4 * 2 * ((64 + 192) + (64 + 64) + (64 + 256) + (256 + 64)))


# -- FSDP2 ---------------------------------------------------------------------------------------------------


def passes(engine: Ranks, head: str, packed: bool = True, trained: bool = True) -> list[dict[str, Any]]:
    """One pass of every rank over rows of its own, without the policy step around it."""

    def work(head: str, packed: bool, trained: bool) -> Any:
        import torch

        from rlbench.trainers.passes.forward import PolicyModel
        from tests.modules import RAGGED, batch_of

        module, strategy = globals()["module"], globals()["strategy"]
        module.zero_grad()
        policy = PolicyModel(module, torch.device("cpu"), strategy.bf16)
        given = batch_of(RAGGED[strategy.rank :], seed=strategy.rank)
        with (
            torch.set_grad_enabled(trained),
            policy.stats(given, 0.8, packed, head) as (found, _),
        ):
            logprobs, entropy = found.logprobs, found.entropy
            if trained:
                weights = torch.linspace(-1, 1, len(logprobs))
                total = (logprobs * weights).sum() + 0.3 * (entropy * weights.flip(0)).sum()
                strategy.backward(total, module, reduction="sum")
        grads = {n: p.grad.full_tensor() for n, p in module.named_parameters() if p.grad is not None}
        return {
            "stats": torch.stack([logprobs, entropy]).detach().numpy(),
            "grads": {name: grad.clone() for name, grad in grads.items()},
            "used": policy.head_used(packed),
        }

    return engine.run(work, head, packed, trained)


@pytest.mark.parametrize(
    ("tied", "packed", "config", "checkpointing"),
    [
        (True, True, {}, False),
        (False, True, {"reshard_after_forward": False}, False),
        (True, False, {"reshard_after_forward": False}, True),
        (False, False, {}, True),
        (True, True, {"bf16": True}, False),
    ],
)
def test_sharded_over_two_ranks_values_and_gradients_are_the_plain_paths(
    folders: dict[bool, str], tied: bool, packed: bool, config: dict[str, Any], checkpointing: bool
) -> None:
    module = qwen_on_meta(folders[tied])
    if checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        module.train()
    half = bool(config.get("bf16"))
    with ranks(2, module, **config) as engine:
        wanted = passes(engine, "plain", packed)
        found = passes(engine, "auto", packed)
        again = passes(engine, "chunked", packed)
    for mine, theirs, repeated in zip(found, wanted, again, strict=True):
        assert mine["used"] == "chunked"
        np.testing.assert_allclose(mine["stats"], theirs["stats"], atol=0.05 if half else 1e-5)
        assert_same(mine["grads"], theirs["grads"], 0.03 if half else 1e-5)
        np.testing.assert_array_equal(mine["stats"], repeated["stats"])
        assert_same(repeated["grads"], mine["grads"], 0.0)


def test_a_frozen_module_is_scored_the_same_and_gets_no_gradient(folders: dict[bool, str]) -> None:
    class Frozen(TrainedQwen):
        on_weights_materialized = None

    module = qwen_on_meta(folders[True])
    module.requires_grad_(False)
    with ranks(2, module) as engine:
        wanted, found = passes(engine, "plain", trained=False), passes(engine, "chunked", trained=False)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine["stats"], theirs["stats"], atol=1e-5)
        assert not mine["grads"]


def test_a_loss_of_the_entropy_alone_or_of_the_log_probs_alone_reaches_every_weight(
    folders: dict[bool, str],
) -> None:
    for column in ("logprobs", "entropy"):
        model = Qwen2ForCausalLM.from_pretrained(folders[True])
        grads = []
        for head in ("plain", "chunked"):
            model.zero_grad()
            with PolicyModel(model, CPU, half=False).stats(batch_of(RAGGED), 1.0, True, head) as (found, _):
                getattr(found, column).sum().backward()
            grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
        assert_same(grads[1], grads[0])


def test_the_train_engine_uses_it_by_default_and_steps_as_ever(folders: dict[bool, str]) -> None:
    def count(begin: bool) -> Any:
        from rlbench.trainers.passes import chunked_head

        if begin:
            globals()["calls"] = calls = []
            globals()["real"] = real = chunked_head.linear_token_stats
            chunked_head.linear_token_stats = lambda *given: calls.append(1) or real(*given)
        else:
            chunked_head.linear_token_stats = globals()["real"]
        return len(globals()["calls"])

    given = batch_of(RAGGED)
    with ranks(2, qwen_on_meta(folders[True])) as engine:
        engine.run(count, True)
        result = engine.call("policy_forward_backward", given, cloudpickle.dumps(grpo()), {})[0]
        assert engine.call("policy_optim_step", {})[0]["stepped"]
        scored = engine.call("policy_forward", given, {})
        assert engine.run(count, False) == [3, 3]  # the proof, the training, the scoring
    assert np.isfinite(result["metrics"]["loss"]) and sum(len(part["rows"]) for part in scored) == len(given)
