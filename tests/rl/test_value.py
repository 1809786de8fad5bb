"""The critic's loss against a loop, its gradient at the clip's edge, explained variance, and the pretraining loss."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl.supervised import explained_variance, ptx_loss, value_loss

NAN = float("nan")


def random_batch(seed: int, rows: int = 3, width: int = 4, scale: float = 1.0):
    random = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=random) < 0.7

    def draw():
        drawn = scale * torch.randn(rows, width, generator=random, dtype=torch.float64)
        return torch.where(mask, drawn, NAN)

    return draw(), draw(), draw(), mask


@settings(derandomize=True, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    width=st.integers(1, 5),
    clip=st.sampled_from([None, 0.2, 0.5, 3.0]),
    scale=st.sampled_from([0.1, 1.0, 50.0]),
)
def test_value_loss_equals_the_loop(seed, rows, width, clip, scale):
    values, returns, old, mask = random_batch(seed, rows, width, scale)
    loss, metrics = value_loss(values, returns, mask, old, clip)
    for i in range(rows):
        for t in range(width):
            if not mask[i, t]:
                assert loss[i, t] == metrics["value_clip_fraction"][i, t] == 0
                continue
            v, r, o = values[i, t].item(), returns[i, t].item(), old[i, t].item()
            expected = 0.5 * (v - r) ** 2
            if clip is not None:
                clipped = 0.5 * (o + min(max(v - o, -clip), clip) - r) ** 2
                assert metrics["value_clip_fraction"][i, t] == (clipped > expected + 1e-9 and abs(v - o) > clip)
                expected = max(expected, clipped)
            assert loss[i, t].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [(2.0, 0.5 * 1.5**2, 0.0), (1.2, 0.5 * 1.8**2, -1.8), (-2.0, 0.5 * 5.0**2, -5.0)],
)
def test_value_clipping_by_hand(value, loss, gradient):
    """Old value 1, return 3, bound 0.5: beyond it towards the return there is no more pull."""
    v = torch.tensor([[value]], requires_grad=True)
    got, _ = value_loss(v, torch.tensor([[3.0]]), torch.tensor([[True]]), torch.tensor([[1.0]]), clip=0.5)
    got.sum().backward()
    assert got.item() == pytest.approx(loss)
    assert v.grad is not None
    assert v.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("clip", [None, 0.4])
def test_value_gradients(clip):
    values, returns, old, mask = random_batch(3)
    leaf = torch.where(mask, values, 0.3).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns, mask, old, clip)[0], [leaf])
    garbage = values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value_loss(garbage, returns, mask, old, clip)[0].sum(), garbage)
    assert torch.isfinite(gradient).all()
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_values_are_computed_in_float32(dtype):
    values, returns, _, mask = random_batch(1)
    got, _ = value_loss(values.to(dtype), returns, mask)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, value_loss(values.to(dtype).float(), returns, mask)[0])


def test_value_loss_refusals():
    values, returns, old, mask = random_batch(1)
    with pytest.raises(ValueError, match=r"returns has shape \(3, 3\); wanted \(3, 4\)"):
        value_loss(values, returns[:, :3], mask)
    with pytest.raises(LossError, match=r"clip=-0\.1"):
        value_loss(values, returns, mask, old, clip=-0.1)
    with pytest.raises(LossError, match="old_values"):
        value_loss(values, returns, mask, clip=0.1)
    with pytest.raises(LossError, match="empty"):
        value_loss(values[:0], returns[:0], mask[:0])


def test_explained_variance_by_hand():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    returns = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full_like(returns, 7.0), returns, mask) == pytest.approx(0)
    assert explained_variance(returns + 5, returns, mask) == pytest.approx(1), "a constant error does not matter"
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert explained_variance(returns / 2, returns, mask) == pytest.approx(0.75)


def test_explained_variance_of_what_does_not_vary_is_zero():
    same = torch.full((2, 3), 0.7)
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert explained_variance(torch.randn(2, 3), same, mask) == 0
    assert explained_variance(same, same, ~mask) == 0


def test_ptx_is_the_cross_entropy_of_the_next_token():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, generator=random, dtype=torch.float64)
    tokens = torch.tensor([[1, 4, 0, 2], [3, 3, 1, -100]])
    mask = torch.tensor([[False, True, True, True], [True, False, True, False]])
    loss = ptx_loss(logits, tokens, mask)
    assert tuple(loss.shape) == (2, 3)
    for i in range(2):
        for t in range(3):
            expected = 0.0
            if mask[i, t + 1]:
                row = logits[i, t].tolist()
                total = sum(math.exp(v) for v in row)
                expected = -math.log(math.exp(row[int(tokens[i, t + 1])]) / total)
            assert loss[i, t].item() == pytest.approx(expected)


def test_ptx_gradients_do_not_leak():
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens = torch.tensor([[0, 1, 2], [3, 2, 1]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    leaf = logits.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ptx_loss(x, tokens, mask), [leaf])
    garbage = logits.clone()
    garbage[1, 1:] = NAN
    garbage[0, 2] = NAN
    garbage.requires_grad_()
    (gradient,) = torch.autograd.grad(ptx_loss(garbage, tokens, mask).sum(), garbage)
    assert torch.isfinite(gradient).all()
    assert (gradient[1, 1:] == 0).all()
    nothing = ptx_loss(garbage, tokens, torch.zeros_like(mask))
    assert nothing.sum() == 0


def test_ptx_refusals_and_dtypes():
    logits, tokens = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"logits has shape \(2, 2, 4\)"):
        ptx_loss(logits[:, :2], tokens, mask)
    with pytest.raises(LossError, match="tokens has shape"):
        ptx_loss(logits, tokens[:1], mask)
    assert ptx_loss(logits.bfloat16(), tokens, mask).dtype == torch.float32
