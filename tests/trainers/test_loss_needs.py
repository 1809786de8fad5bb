"""Losses that see hidden states, logits, a teacher's tokens and columns of the batch, on ranks, equal plain code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

import rlbench.nn
from rlbench import rl
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import DataError, LossError
from tests.modules import RAGGED, VOCAB, RunningMeanModel, batch_of
from tests.ranks import SameRanks, ranks
from tests.trainers.policy_reference import assert_gradients, forward_backward

SPLITS = [
    (1, {}),
    (2, {"token_budget": 30}),
    (2, {"token_budget": 45, "packing": False}),
    (1, {"token_budget": 30, "head": "plain"}),
    (2, {"packing": False, "head": "plain"}),
]


def teacher_said(batch: TrainBatch, k: int = 5, seed: int = 3) -> TrainBatch:
    """A batch with what a teacher of random logits says of it."""
    logits = torch.randn(batch.tokens, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    logp = torch.log_softmax(logits, -1)
    top, ids = logp.topk(k)
    sampled = logp[torch.arange(batch.tokens), torch.from_numpy(batch.responses.values.astype(np.int64))]
    return batch.with_columns(teacher_logprobs=sampled, teacher_ids=ids, teacher_top_logprobs=top)


def per_token(model: Any, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states (N, H) and logits (N, V) that predict the response tokens, row by row and without packing."""
    hidden, logits = [], []
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        out = model(ids[None], output_hidden_states=True)
        at = slice(len(prompt) - 1, len(ids) - 1)
        hidden.append(out.hidden_states[-1][0, at])
        logits.append(out.logits[0, at])
    return torch.cat(hidden), torch.cat(logits)


def of_hidden(inputs: Any) -> Any:
    """Of the hidden states alone, but for the weights of the tokens."""
    assert inputs.logits is None and inputs.hidden_states.dtype == torch.float32
    loss = inputs.hidden_states.pow(2).mean(-1) * inputs.channels["weight"]
    return loss + inputs.logprobs * 0.1, {"size": loss}


of_hidden.needs = ("hidden_states",)  # type: ignore[attr-defined]


def of_logits(inputs: Any) -> Any:
    """Half the squared distance to flat logits, without the log-probs."""
    return 0.5 * inputs.logits.var(-1), {}


of_logits.needs = "logits"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("world_size", "options"), SPLITS)
def test_a_loss_of_hidden_states_or_logits_gives_the_plain_gradient(
    qwen: str, trained: SameRanks, world_size: int, options: dict[str, Any]
) -> None:
    given = batch_of(RAGGED)
    given = given.with_columns(weight=np.linspace(0.5, 2.0, len(given)))
    mask, weight = torch.from_numpy(given.mask), torch.from_numpy(given.columns["weight"])
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    ids = torch.from_numpy(given.responses.values.astype(np.int64))
    with trained(world_size) as engine:
        for loss in (of_hidden, of_logits):
            model.zero_grad()
            hidden, logits = per_token(model, given)
            logp = torch.log_softmax(logits, -1)[torch.arange(len(ids)), ids]
            plain = hidden.pow(2).mean(-1) * weight + 0.1 * logp if loss is of_hidden else 0.5 * logits.var(-1)
            expected = plain[mask].mean()
            expected.backward()
            found = forward_backward(engine, given, loss, **options)[0]
            assert found["metrics"]["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
            assert_gradients(engine, model)
            engine.call("policy_zero_grad")


@pytest.mark.parametrize(("world_size", "options"), SPLITS)
@pytest.mark.parametrize("loss", [rl.gkd(beta=0.3), rl.gkd(beta=1.0), rl.gkd(beta=0.0, tail=False), rl.sampled_kl()])
def test_losses_of_a_teacher_give_the_plain_gradient(
    qwen: str, trained: SameRanks, world_size: int, options: dict[str, Any], loss: Any
) -> None:
    given = teacher_said(batch_of(RAGGED))
    mask = torch.from_numpy(given.mask)
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    logp = torch.log_softmax(per_token(model, given)[1], -1)
    teacher, top, ids = (torch.from_numpy(given.columns[f"teacher_{n}"]) for n in ("logprobs", "top_logprobs", "ids"))
    if isinstance(loss, rl.sampled_kl):
        sampled = logp[torch.arange(len(logp)), torch.from_numpy(given.responses.values.astype(np.int64))]
        plain = 0.5 * (sampled - teacher) ** 2
    else:
        student = logp.gather(1, ids)
        if loss.tail:
            student, top = (torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], -1) for x in (student, top))
        p, q = student.exp(), top.exp()
        m = loss.beta * q + (1 - loss.beta) * p
        forward, reverse = (q * (top - student)).sum(-1), (p * (student - top)).sum(-1)
        jsd = loss.beta * (q * (top - m.log())).sum(-1) + (1 - loss.beta) * (p * (student - m.log())).sum(-1)
        plain = {0.0: forward, 1.0: reverse}.get(loss.beta, jsd)
    expected = plain[mask].mean()
    expected.backward()
    with trained(world_size) as engine:
        metrics = forward_backward(engine, given, loss, **options)[0]["metrics"]
        assert_gradients(engine, model)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"packing": False, "head": "plain"}])
def test_a_forward_gives_the_likeliest_tokens_and_what_losses_ask_for(
    qwen: str, trained: SameRanks, options: dict[str, Any]
) -> None:
    given = batch_of(RAGGED)
    hidden, logits = (x.detach() for x in per_token(Qwen2ForCausalLM.from_pretrained(qwen), given))
    wanted = torch.log_softmax(logits / 0.7, -1).topk(4)
    with trained(2) as engine:
        asked = {"top_k": 4, "temperature": 0.7, "needs": ("hidden_states",), "token_budget": 30, **options}
        parts = engine.call("policy_forward", given, asked)
        with pytest.raises(DataError, match=f"top_k=97: the model has {VOCAB} tokens"):
            engine.call("policy_forward", given, {"top_k": 97})
    from rlbench.data.base.ragged import rows_in_order

    found = rows_in_order(parts)
    np.testing.assert_array_equal(found["candidates"].values, wanted.indices.numpy())
    np.testing.assert_allclose(found["candidate_logprobs"].values, wanted.values.numpy(), atol=1e-5)
    np.testing.assert_allclose(found["hidden_states"].values, hidden.numpy(), atol=1e-5)


def test_what_cannot_be_given_is_refused_and_leaves_the_ranks_usable(trained: SameRanks) -> None:
    given = batch_of(RAGGED)
    strange = teacher_said(given).with_columns(teacher_ids=np.full((given.tokens, 5), 99))

    def unknown(inputs: Any) -> Any:
        return inputs.logprobs, {}

    unknown.needs = ("hiden_states",)  # type: ignore[attr-defined]
    with trained(1) as engine:
        for loss, batch, options, said in (
            (unknown, given, {}, "nearest: hidden_states"),
            (of_logits, given, {"head": "chunked"}, "head='chunked' never makes"),
            (rl.gkd(), given, {}, r"teacher\.score\(batch\)"),
            (rl.gkd(), given.with_columns(teacher_logprobs=given.advantages), {}, "top_k=16"),
        ):
            with pytest.raises(LossError, match=said):
                forward_backward(engine, batch, loss, **options)
        with pytest.raises(DataError, match="token ids from 99 to 99"):
            forward_backward(engine, strange, rl.gkd())
        assert np.isfinite(forward_backward(engine, teacher_said(given), rl.gkd())[0]["metrics"]["loss"])


def test_a_model_that_names_no_output_layer_has_no_hidden_states() -> None:
    given = batch_of(RAGGED).with_columns(weight=1.0 * np.ones(len(RAGGED)))
    weights = RunningMeanModel().state_dict()
    with rlbench.nn.device("meta"):
        module = RunningMeanModel(source=dict(weights))
    with ranks(1, module) as engine, pytest.raises(LossError, match="which is its output layer"):
        forward_backward(engine, given, of_hidden, packing=False)
