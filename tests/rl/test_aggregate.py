"""The normaliser covers the whole step: values by hand, and gradients that do not depend on the split."""

import pytest
import torch

from rlbench.errors import LossError
from rlbench.rl import Aggregation, BatchTotals, LossInputs, grpo
from rlbench.rl.aggregate import MODES

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]]).bool()
GROUP = torch.tensor([7, 7, 3, 5, 3])


def by_hand(mode: str, loss: torch.Tensor) -> float:
    rows = [loss[i][MASK[i]].tolist() for i in range(len(MASK))]
    rows = [row for row in rows if row]
    tokens = sum(len(row) for row in rows)
    total = sum(sum(row) for row in rows)
    return {
        "token-mean": total / tokens,
        "token-sum": total,
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum": total / len(rows),
        "seq-mean-token-sum-norm": total / (len(rows) * 4),
        "prompt-mean": (
            (loss[0].sum() + loss[1, 0] + loss[1, 2]) / 6 + (loss[2, 2] + loss[4, 0] + loss[4, 1]) / 3
        ).item()
        / 2,
    }[mode]


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_equals_its_formula(mode):
    loss = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    weights = Aggregation(mode).weights(MASK, BatchTotals.of(MASK, GROUP), GROUP)
    assert (weights[~MASK] == 0).all()
    assert (loss * weights).sum().item() == pytest.approx(by_hand(mode, loss), abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("split", [[5], [1, 4], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_the_gradient_does_not_depend_on_the_split(mode, split):
    """A linear policy; micro-batches are cut to their own longest row, as a trainer does."""
    random = torch.Generator().manual_seed(1)
    features = torch.randn(5, 4, 3, generator=random)
    old = -torch.rand(5, 4, generator=random)
    advantages = torch.randn(5, 1, generator=random).expand(5, 4)
    totals = BatchTotals.of(MASK, GROUP)

    def gradient(sizes: list[int]) -> torch.Tensor:
        weight = torch.full((3,), 0.1, requires_grad=True)
        start = 0
        for size in sizes:
            rows = slice(start, start + size)
            width = max(int(MASK[rows].nonzero()[:, 1].max()) + 1 if MASK[rows].any() else 1, 1)
            mask = MASK[rows, :width]
            inputs = LossInputs(
                logprobs=old[rows, :width] + features[rows, :width] @ weight,
                old_logprobs=old[rows, :width],
                sampler_logprobs=old[rows, :width],
                ref_logprobs=None,
                advantages=advantages[rows, :width],
                mask=mask,
                entropy=torch.zeros(mask.shape),
            )
            per_token, _ = grpo()(inputs)
            (per_token * Aggregation(mode).weights(mask, totals, GROUP[rows])).sum().backward()
            start += size
        assert weight.grad is not None
        return weight.grad

    torch.testing.assert_close(gradient(split), gradient([5]), rtol=1e-5, atol=1e-6)
    assert gradient(split).abs().sum() > 0


def test_totals_of_parts_are_the_totals_of_the_whole():
    parts = [BatchTotals.of(MASK[:2], GROUP[:2]), BatchTotals.of(MASK[2:], GROUP[2:])]
    assert BatchTotals.combine(parts) == BatchTotals.of(MASK, GROUP)
    assert BatchTotals.of(MASK, GROUP) == BatchTotals(9, 4, 4, prompts=2, prompt_tokens={7: 6, 3: 3})
    split_prompt = [BatchTotals.of(MASK[:1], GROUP[:1]), BatchTotals.of(MASK[1:], GROUP[1:])]
    assert BatchTotals.combine(split_prompt) == BatchTotals.of(MASK, GROUP)


def test_a_second_batch_in_a_step_brings_other_prompts_whatever_their_numbers():
    first, second = BatchTotals.of(MASK[:2], GROUP[:2]), BatchTotals.of(MASK[2:], GROUP[:3])
    both = first.then(second)
    assert (both.tokens, both.sequences, both.prompts) == (9, 4, 3)
    weights = Aggregation("prompt-mean").weights(MASK[2:], both, GROUP[:3])
    assert weights.sum().item() == pytest.approx(2 / 3), "its two prompts are two of three"


def test_a_constant_length_takes_the_place_of_the_longest():
    aggregation = Aggregation("seq-mean-token-sum-norm", length=10)
    weights = aggregation.weights(MASK, BatchTotals.of(MASK))
    assert weights.sum().item() == pytest.approx(9 / (4 * 10))
    assert Aggregation.of(aggregation) is aggregation
    assert Aggregation.of("token-sum") == Aggregation("token-sum")


def test_refusals_name_the_mend():
    with pytest.raises(ValueError, match="token-mean"):
        Aggregation("token_mean")
    with pytest.raises(LossError, match="nothing to train on"):
        Aggregation().weights(MASK[3:4], BatchTotals.of(MASK[3:4]))
    with pytest.raises(LossError, match="acts in"):
        Aggregation("token-mean", length=10)
    prompt_mean = Aggregation("prompt-mean")
    with pytest.raises(LossError, match="needs group"):
        prompt_mean.weights(MASK, BatchTotals.of(MASK, GROUP))
    with pytest.raises(LossError, match=r"group has shape \(4,\); wanted \(5,\)"):
        prompt_mean.weights(MASK, BatchTotals.of(MASK, GROUP), GROUP[:4])
    with pytest.raises(LossError, match=r"group holds \[9\]"):
        prompt_mean.weights(MASK, BatchTotals.of(MASK, GROUP), GROUP.masked_fill(GROUP == 3, 9))
