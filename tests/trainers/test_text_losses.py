"""Losses of texts and pairs on ranks equal plain implementations in one process, however the batch is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import Qwen2ForCausalLM

from rlbench import rl
from rlbench.data.batches.batch import TrainBatch, of_texts
from rlbench.data.texts.preferences import of_pairs
from rlbench.errors import LossError
from rlbench.trainers.passes.micro_batches import plan_micro_batches
from tests.modules import RAGGED, VOCAB, qwen_on_meta
from tests.ranks import ranks
from tests.trainers.policy_reference import assert_gradients, forward_backward

PAIRS = [(3, 9), (3, 4), (7, 2), (7, 6), (4, 17), (4, 3), (2, 5), (2, 5), (6, 1), (6, 8)]


def texts(lengths: list[tuple[int, int]], seed: int = 0) -> list[list[Any]]:
    rng = np.random.default_rng(seed)
    masks = [rng.random(r) > 0.3 for _, r in lengths]
    for mask in masks:
        mask[0] = True
    rows = [[rng.integers(0, VOCAB, n) for n in each] for each in zip(*lengths, strict=True)]
    return [*rows, masks]


def reference(batch: TrainBatch, seed: int = 5) -> np.ndarray:
    return (-4.5 + 0.3 * np.random.default_rng(seed).normal(size=batch.tokens)).astype(np.float32)


def pairs_batch(**fields: Any) -> TrainBatch:
    prompts, responses, masks = texts(PAIRS)
    prompts = [prompts[i - i % 2] for i in range(len(prompts))]
    batch = of_pairs(prompts, responses, masks, **fields)
    return batch.replace(ref_logprobs=reference(batch))


def sums(model: Any, batch: TrainBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each sequence: log-prob of its trained tokens, the reference's, and how many there are; (B,)."""
    found = []
    for i, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logp = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)[torch.arange(len(ids) - 1), ids[1:]]
        at = slice(*batch.responses.offsets[i : i + 2].tolist())
        mask = torch.from_numpy(batch.mask[at])
        ref = torch.zeros(()) if batch.ref_logprobs is None else torch.from_numpy(batch.ref_logprobs[at])[mask].sum()
        found.append((logp[len(prompt) - 1 :][mask].sum(), ref, mask.sum().float()))
    return tuple(torch.stack(one) for one in zip(*found, strict=True))  # type: ignore[return-value]


def plain(name: str, model: Any, batch: TrainBatch) -> torch.Tensor:
    """The mean over pairs, as TRL writes it down."""
    logp, ref, count = sums(model, batch)
    c, r = logp[0::2], logp[1::2]
    if name in ("dpo", "dpo_margin", "ipo"):
        logits = (c - r) - (ref[0::2] - ref[1::2])
        if name == "ipo":
            return ((logits - 1 / (2 * 0.1)) ** 2).mean()
        margin = torch.from_numpy(batch.margin[0::2]) if batch.margin is not None else 0.0
        return -logsigmoid(0.1 * logits - margin).mean()
    c, r = c / count[0::2], r / count[1::2]
    if name == "simpo":
        return -logsigmoid(2.0 * (c - r) - 0.5).mean()
    odds = (c - r) - (torch.log1p(-torch.exp(c)) - torch.log1p(-torch.exp(r)))
    return (-c - 0.1 * logsigmoid(odds)).mean()


SPLITS = [
    (1, {}),
    (1, {"token_budget": 1}),
    (2, {"token_budget": 30}),
    (2, {"token_budget": 45, "packing": False}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "options"), SPLITS)
def test_sft_is_the_cross_entropy_of_transformers(qwen: str, world_size: int, options: dict[str, Any]) -> None:
    given = of_texts(*texts(RAGGED))
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    losses, masks = [], given.responses.with_values(given.mask)
    for prompt, response, mask in zip(given.prompts, given.responses, masks, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        labels = torch.where(torch.from_numpy(np.concatenate([np.zeros(len(prompt), bool), mask])), ids, -100)
        losses.append(cross_entropy(model(ids[None]).logits[0, :-1], labels[1:], reduction="sum"))
    expected = torch.stack(losses).sum() / int(given.mask.sum())
    expected.backward()
    with ranks(world_size, qwen_on_meta(qwen)) as engine:
        metrics = forward_backward(engine, given, "sft", **options)[0]["metrics"]
        assert_gradients(engine, model)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    assert np.isfinite(list(metrics.values())).all()
    assert not any(name.startswith(("mismatch", "logprob_gap")) for name in metrics), "there was no sampler"


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "options"), SPLITS)
def test_pair_losses_are_the_plain_ones_however_the_pairs_are_split(
    qwen: str, world_size: int, options: dict[str, Any]
) -> None:
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    with ranks(world_size, qwen_on_meta(qwen)) as engine:
        for name in ("dpo", "dpo_margin", "ipo", "simpo", "orpo"):
            given = pairs_batch(margins=[0.5, 0.0, 1.0, 2.0, -1.0] if name == "dpo_margin" else None)
            model.zero_grad()
            expected = plain(name, model, given)
            expected.backward()
            metrics = forward_backward(engine, given, name.partition("_")[0], **options)[0]["metrics"]
            assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-5), name
            assert_gradients(engine, model, atol=1e-4 if name == "ipo" else 2e-6)
            engine.call("policy_zero_grad")
            logp, ref, count = sums(model, given)
            with_reference = name in ("dpo", "dpo_margin", "ipo")
            base, beta = (logp - ref, 0.1) if with_reference else (logp / count, 2.0 if name == "simpo" else 0.1)
            margins = beta * (base[0::2] - base[1::2])
            assert metrics["reward_margin"] == pytest.approx(float(margins.detach().mean()), rel=1e-4)
            assert metrics["reward_accuracy"] == pytest.approx(float((margins > 0).float().mean()))


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "options"), SPLITS)
def test_kto_is_the_plain_one_however_its_responses_are_split(
    qwen: str, world_size: int, options: dict[str, Any]
) -> None:
    prompts, responses, masks = texts(PAIRS)
    judged = np.array([1, 0, -1, 0, 1, 0, 1, 0, -1, 0], np.int8)
    masks = [mask & (one != 0) for mask, one in zip(masks, judged, strict=True)]
    given = of_texts(prompts, responses, masks, preference=judged)
    given = given.replace(ref_logprobs=reference(given) - 0.5)  # so that the point is above 0
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    logp, ref, _ = sums(model, given)
    whole, whole_ref, _ = sums(model, given.replace(mask=np.ones_like(given.mask)))
    point = (whole - whole_ref)[judged == 0].mean().detach().clamp(min=0)
    ratio = logp - ref
    good = 1 - torch.sigmoid(0.1 * (ratio - point))
    bad = 1.5 * (1 - torch.sigmoid(0.1 * (point - ratio)))
    expected = torch.cat([good[judged == 1], bad[judged == -1]]).mean()
    expected.backward()
    with ranks(world_size, qwen_on_meta(qwen)) as engine:
        loss = rl.kto(undesirable_weight=1.5)
        metrics = forward_backward(engine, given, loss, **options)[0]["metrics"]
        assert_gradients(engine, model)
    assert float(point) > 0 and metrics["point"] == pytest.approx(float(point), rel=1e-4)
    assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, sign in (("reward_chosen", 1), ("reward_rejected", -1)):
        rewards = 0.1 * ratio.detach()[torch.from_numpy(judged == sign)]
        assert metrics[name] == pytest.approx(float(rewards.mean()), rel=1e-4)


@pytest.mark.slow
def test_a_function_of_ones_own_sees_pairs_as_ours_do(qwen: str) -> None:
    given = pairs_batch(margins=[1.0, 2.0, 3.0, 4.0, 5.0])

    def mine(inputs: Any) -> Any:
        c, r = inputs.chosen, inputs.rejected
        x = (c.logprobs - r.logprobs) - (c.ref_logprobs - r.ref_logprobs)
        wins = (x > 0).float()
        per_pair = torch.nn.functional.softplus(c.margin - 0.1 * x)
        return inputs.of_pairs(per_pair), {"wins": inputs.of_pairs(wins)[:, :1], "tokens of it": c.tokens.mean()}

    mine.aggregation = "seq-mean-token-mean"  # type: ignore[attr-defined]
    with ranks(2, qwen_on_meta(qwen)) as engine:
        own = forward_backward(engine, given, mine, token_budget=30)[0]["metrics"]
        engine.call("policy_zero_grad")
        ours = forward_backward(engine, given, rl.dpo(), token_budget=60)[0]["metrics"]
    assert own["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert own["wins"] == ours["reward_accuracy"]


@pytest.mark.slow
def test_half_a_pair_and_no_pair_are_refused_on_the_ranks(qwen: str) -> None:
    with ranks(1, qwen_on_meta(qwen)) as engine:
        with pytest.raises(LossError, match="sequence 0 is one of a pair"):
            forward_backward(engine, pairs_batch()[1:], "dpo")
        plain_batch = of_texts(*texts(RAGGED))
        with pytest.raises(LossError, match="the batch has none"):
            forward_backward(engine, plain_batch, "simpo")
        with pytest.raises(LossError, match="no policy sampled"):
            forward_backward(engine, plain_batch, "importance_sampling")
        with pytest.raises(LossError, match=r"takes no margin.*margin=None"):
            forward_backward(engine, pairs_batch(margins=[1.0] * 5), "ipo")
        with pytest.raises(LossError, match=r"rb\.data\.labelled"):
            forward_backward(engine, pairs_batch(), "kto")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 20, 64, 10_000])
def test_no_plan_splits_a_pair(world: int, budget: int) -> None:
    rng = np.random.default_rng(budget + world)
    for count in (1, 2, 7, 40):
        lengths = rng.integers(1, 30, 2 * count)
        pair = rng.permutation(np.repeat(np.arange(count), 2))
        pair = np.where(rng.random(2 * count) < 0.1, -1, pair)
        plan = plan_micro_batches(lengths, world, budget, pair)
        rows = np.concatenate([rows for steps in plan for rows in steps])
        assert sorted(rows.tolist()) == list(range(2 * count))
        assert len({len(steps) for steps in plan}) == 1, "the same number of passes on all ranks"
        for steps in plan:
            for held in steps:
                numbers = pair[held][pair[held] >= 0]
                assert all((pair == n).sum() == (numbers == n).sum() for n in np.unique(numbers))
                assert list(lengths[held]) == sorted(lengths[held])
        largest = max(int(lengths[pair == n].sum()) for n in np.unique(pair) if n >= 0) if (pair >= 0).any() else 0
        limit = max(budget, largest, int(lengths.max()))
        assert all(lengths[held].sum() <= limit for steps in plan for held in steps)


def test_pairs_of_inputs_are_sorted_by_number_and_whole() -> None:
    logprobs = torch.arange(1.0, 9.0).reshape(4, 2).requires_grad_()
    fields = dict.fromkeys(("old_logprobs", "sampler_logprobs", "advantages", "entropy"), torch.zeros(4, 2))
    mask = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]]).bool()
    made: dict[str, Any] = {"logprobs": logprobs, "ref_logprobs": None, "mask": mask, **fields}
    x = rl.LossInputs(**made, preference=torch.tensor([1, -1, 1, -1]), pair=torch.tensor([5, 2, 2, 5]))
    assert x.chosen.rows.tolist() == [2, 0] and x.rejected.rows.tolist() == [1, 3]
    assert x.chosen.logprobs.tolist() == [6.0, 3.0] and x.chosen.mean_logprobs.tolist() == [6.0, 1.5]
    assert x.rejected.tokens.tolist() == [1.0, 2.0] and x.chosen.margin is None
    assert x.of_pairs(torch.tensor([10.0, 20.0])).tolist() == [[20, 20], [10, 10], [10, 10], [20, 20]]
    with pytest.raises(LossError, match="needs ref_logprobs"):
        _ = x.chosen.ref_logprobs
    with pytest.raises(LossError, match="a pair is not whole"):
        _ = rl.LossInputs(**made, preference=torch.tensor([1, -1, 1, 1]), pair=torch.tensor([5, 2, 2, 5])).chosen.rows
    with pytest.raises(LossError, match="compares pairs, and the batch has none"):
        _ = rl.LossInputs(**made).chosen.rows
