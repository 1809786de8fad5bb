"""High-entropy tokens: which ones, what ties do, and that the step's split does not matter."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl.policy import PolicyLoss, high_entropy
from rlbench.rl.types import LossInputs

NAN = float("nan")


def inputs(entropy, mask=None) -> LossInputs:
    entropy = torch.as_tensor(entropy, dtype=torch.float32)
    mask = torch.ones(entropy.shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
    ones = torch.where(mask, 1.0, NAN)
    return LossInputs(-ones, -ones, -ones, -2 * ones, ones, mask, torch.where(mask, entropy, NAN))


def slow_kept(entropy: list[float], fraction: float) -> list[bool]:
    """Sorted by hand: at least the k-th largest."""
    if not entropy:
        return []
    k = max(1, math.floor(len(entropy) * fraction + 1e-9))
    return [value >= sorted(entropy, reverse=True)[k - 1] for value in entropy]


@settings(derandomize=True, max_examples=60)
@given(
    rows=st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.3, 2.0]), max_size=7), min_size=1, max_size=5),
    fraction=st.sampled_from([0.01, 0.2, 0.29, 0.5, 1.0]),
)
def test_both_levels_equal_sorting_by_hand(rows, fraction):
    width = max(len(row) for row in rows) + 1
    entropy = torch.tensor([row + [99.0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    x = inputs(entropy, mask)

    by_row = high_entropy(fraction, level="sequence")(x)
    assert not by_row[~mask].any()
    for got, row in zip(by_row, rows, strict=True):
        assert got[: len(row)].tolist() == slow_kept(row, fraction)

    whole = high_entropy(fraction)(x)
    assert not whole[~mask].any()
    assert whole[mask].tolist() == slow_kept([value for row in rows for value in row], fraction)


def test_a_fifth_of_ten_tokens_is_two_whatever_sequence_they_are_in():
    x = inputs([[0.1, 2.0, 0.3, 1.9, 0.2], [0.4, 0.1, 0.2, 0.3, 0.0]])
    assert high_entropy()(x).nonzero().tolist() == [[0, 1], [0, 3]]
    assert high_entropy(level="sequence")(x).nonzero().tolist() == [[0, 1], [1, 0]]


def test_a_row_of_four_at_two_fifths_keeps_one():
    assert high_entropy(0.4, level="sequence")(inputs([[0.1, 0.4, 0.3, 0.2]])).tolist() == [[0, 1, 0, 0]]


def test_a_fraction_is_not_lost_to_rounding():
    x = inputs(torch.arange(100.0)[None])
    assert high_entropy(0.29)(x).sum() == 29, "0.29 * 100 is 28.999999999999996 in floating point"


def test_tokens_that_tie_with_the_last_one_kept_are_all_kept():
    x = inputs([[0.5, 0.5, 0.1], [0.5, 0.0, 0.0]])
    assert high_entropy(0.2)(x).tolist() == [[1, 1, 0], [1, 0, 0]]
    flipped = inputs(x.entropy.flip(0), x.mask.flip(0))
    assert torch.equal(high_entropy(0.2)(flipped), high_entropy(0.2)(x).flip(0)), "the order does not matter"


def test_the_batch_level_looks_at_the_whole_step():
    x = inputs([[0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.3, 0.4]])
    kept = high_entropy(0.5)
    assert kept.needs_plan
    assert not high_entropy(level="sequence").needs_plan
    channels = kept.plan(x)
    second = dataclasses.replace(inputs(x.entropy[1:]), channels={n: c[1:] for n, c in channels.items()})
    assert not kept(second).any(), "its tokens are the lower half of the step"
    assert kept(inputs(x.entropy[1:])).sum() == 2, "called by hand, the batch is the step"


@dataclasses.dataclass(frozen=True)
class plain(PolicyLoss):
    def surrogate(self, x):
        return -x.advantages * x.logprobs, {}


@pytest.mark.parametrize("level", ["batch", "sequence"])
def test_a_filtered_token_loses_its_policy_term_and_keeps_its_kl(level):
    x = inputs([[0.1, 0.9], [0.8, 0.3]], [[1, 1], [1, 0]])
    leaf = torch.where(x.mask, x.logprobs, 0.0).requires_grad_()
    x = dataclasses.replace(x, logprobs=leaf)
    loss, metrics = plain(tokens=high_entropy(0.67, level), kl_coef=0.5, kl_estimator="k1")(x)
    torch.testing.assert_close(loss, torch.tensor([[0.5, 1.5], [1.5, 0.0]]))
    assert metrics["tokens_kept"].tolist() == [[0, 1], [1, 0]]
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, -0.5], [-0.5, 0.0]]))


def test_an_all_masked_batch_keeps_nothing():
    x = inputs(torch.ones(2, 3), torch.zeros(2, 3))
    for level in ("batch", "sequence"):
        assert not high_entropy(level=level)(x).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_will_do(dtype):
    x = inputs([[0.1, 0.9, 0.5, 0.2, 0.3]])
    assert high_entropy(0.4)(dataclasses.replace(x, entropy=x.entropy.to(dtype))).tolist() == [[0, 1, 1, 0, 0]]


@pytest.mark.parametrize("wrong", [{"fraction": 0.0}, {"fraction": 1.1}, {"fraction": NAN}, {"level": "bacth"}])
def test_bad_values_are_refused(wrong):
    with pytest.raises(LossError, match=next(iter(wrong))):
        high_entropy(**wrong)
