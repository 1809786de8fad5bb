"""Plans and packed passes: budgets hold, ranks are balanced, and packing changes no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2ForCausalLM,
)

from rlbench.errors import DataError, EngineError
from rlbench.trainers.passes.forward import PolicyModel
from rlbench.trainers.passes.micro_batches import plan_micro_batches
from rlbench.trainers.passes.token_stats import token_stats
from tests.modules import RAGGED, VOCAB, RunningMeanModel, batch_of, save_qwen

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_holds_every_row_once_within_the_budget_and_in_equal_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(4, 1, rng.integers(1, 60)).astype(np.int64))
    world, budget = int(rng.integers(1, 5)), int(rng.integers(1, 600))
    plan = plan_micro_batches(lengths, world, budget)
    assert len({len(steps) for steps in plan}) == 1
    rows = np.concatenate([rows for steps in plan for rows in steps])
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    for steps in plan:
        for held in steps:
            assert lengths[held].sum() <= budget or len(held) == 1 or lengths[held].sum() <= lengths.max()


def test_a_plan_balances_tokens_over_ranks() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 128).astype(np.int64) + 1
    loads = [sum(lengths[rows].sum() for rows in steps) for steps in plan_micro_batches(lengths, 4, 4096)]
    assert max(loads) <= 1.1 * min(loads)


def test_no_rows_and_no_budget_are_refused() -> None:
    with pytest.raises(DataError, match="0 sequences"):
        plan_micro_batches(np.zeros(0, np.int64), 1, 10)
    with pytest.raises(DataError, match="token_budget=0"):
        plan_micro_batches(np.ones(2, np.int64), 1, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_have_the_value_and_gradient_of_the_plain_formulas(temperature: float) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(7, 11, dtype=torch.float32, requires_grad=True), torch.randint(0, 11, (7,))
    weights = torch.randn(2, 7)

    def gradient(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((weights[0] * logprobs + weights[1] * entropy).sum(), logits)[0]

    logp = torch.log_softmax(logits / temperature, -1)
    expected = logp[torch.arange(7), targets], -(logp.exp() * logp).sum(-1)
    found = token_stats(logits, targets, temperature)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient(*found), gradient(*expected), rtol=1e-5, atol=1e-6)


def by_hand(model: Any, batch: Any) -> np.ndarray:
    """Log-probs of the responses, one unpadded sequence at a time."""
    found = []
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            output = model(ids[None])
        logp = torch.log_softmax(getattr(output, "logits", output)[0].float(), -1)
        found.append(logp[torch.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]].numpy())
    return np.concatenate(found)


def stats(model: Any, batch: Any, packed: bool) -> np.ndarray:
    with torch.no_grad(), PolicyModel(model, CPU, half=False).stats(batch, 1.0, packed) as (found, _):
        return found.logprobs.numpy()


@pytest.mark.parametrize("packed", [True, False])
def test_packed_and_padded_rows_give_what_single_sequences_give(tmp_path: Path, packed: bool) -> None:
    model = Qwen2ForCausalLM.from_pretrained(save_qwen(tmp_path)).eval()
    batch = batch_of([*RAGGED, (4, 17), (9, 12)])  # equal lengths among them, which share an attention call
    batch = batch.rows(np.argsort(batch.lengths, kind="stable"))
    np.testing.assert_allclose(stats(model, batch, packed), by_hand(model, batch), atol=1e-5)


def test_a_sliding_window_is_kept_when_packed() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=5,
    )
    model = MistralForCausalLM(config).eval()
    batch = batch_of(RAGGED)
    np.testing.assert_allclose(stats(model, batch, True), by_hand(model, batch), atol=1e-5)


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def capped() -> Any:
    config = Gemma2Config(**SMALL, attn_logit_softcapping=0.05, attn_implementation="eager")
    return Gemma2ForCausalLM(config)


def with_sinks() -> Any:
    return GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1))


@pytest.mark.parametrize("make", [capped, with_sinks])
def test_capped_scores_and_sinks_are_kept_when_packed(make: Any) -> None:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    batch = batch_of(RAGGED)
    np.testing.assert_allclose(stats(model, batch, True), by_hand(model, batch), atol=1e-5)


def test_a_packed_pass_leaves_the_users_attention_as_it_was(tmp_path: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(save_qwen(tmp_path), attn_implementation="eager").eval()
    stats(model, batch_of(RAGGED), True)
    assert model.config._attn_implementation == "eager"


def test_a_model_that_cannot_be_packed_is_refused_and_runs_padded() -> None:
    model, batch = RunningMeanModel().eval(), batch_of(RAGGED)
    with pytest.raises(EngineError, match="packing=False"):
        PolicyModel(model, CPU, half=False).prove(batch, True, "plain")
    np.testing.assert_allclose(stats(model, batch, False), by_hand(model, batch), atol=1e-5)


def test_whether_a_model_can_be_packed_is_found_out(tmp_path: Path) -> None:
    policy, batch = PolicyModel(RunningMeanModel().eval(), CPU, half=False), batch_of(RAGGED)
    assert not policy.packs(batch)
    assert policy.unpacked == "RunningMeanModel cannot run packed, being no causal model of transformers"
    other = PolicyModel(Qwen2ForCausalLM.from_pretrained(save_qwen(tmp_path)).eval(), CPU, half=False)
    assert other.packs(batch) and not other.unpacked
    seeing_ahead = Qwen2ForCausalLM.from_pretrained(save_qwen(tmp_path)).eval()
    for layer in seeing_ahead.model.layers:
        layer.self_attn.is_causal = False
    ahead = PolicyModel(seeing_ahead, CPU, half=False)
    assert not ahead.packs(batch) and ahead.unpacked == "Qwen2Attention cannot run packed: it is not causal attention"
    with pytest.raises(EngineError, match="causal attention; pass packing=False"):
        ahead.prove(batch, True, "plain")


def test_layers_that_look_across_sequences_are_found_out(tmp_path: Path) -> None:
    class Leaking(Qwen2ForCausalLM):
        def forward(  # type: ignore[no-untyped-def]
            self,
            input_ids,
            attention_mask=None,
            position_ids=None,
            use_cache=None,
            logits_to_keep=0,
            **kwargs,
        ):
            shifted = torch.arange(input_ids.shape[1])[None].expand_as(position_ids)  # as if nothing had been packed
            return super().forward(
                input_ids,
                attention_mask=attention_mask,
                position_ids=shifted,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                inputs_embeds=None,
                **kwargs,
            )

    model = Leaking.from_pretrained(save_qwen(tmp_path)).eval()
    model.model.rotary_emb.register_forward_hook(lambda m, a, out: tuple(x.cumsum(1) / 9 for x in out))
    with pytest.raises(EngineError, match="look across sequences"):
        PolicyModel(model, CPU, half=False).prove(batch_of(RAGGED), True, "plain")


def test_a_sequence_without_a_prompt_is_refused(tmp_path: Path) -> None:
    model = Qwen2ForCausalLM.from_pretrained(save_qwen(tmp_path)).eval()
    with pytest.raises(DataError, match="sequence 1 has an empty prompt"):
        stats(model, batch_of([(2, 3), (0, 3)]), True)
