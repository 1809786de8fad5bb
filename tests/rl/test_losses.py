"""Losses against loops written out by hand, and what must never leak: the padding."""

import math
import pickle

import pytest
import torch

from rlbench.errors import LossError
from rlbench.rl import LossInputs, grpo, k1, k2, k3, reinforce, resolve


def make_inputs(seed: int = 0, with_ref: bool = True, spread: float = 0.6) -> LossInputs:
    """Three ragged sequences of up to five tokens, garbage under the padding."""
    random = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 1, 1, 1, 0]]).bool()

    def around(base: torch.Tensor) -> torch.Tensor:
        return base + spread * torch.randn(3, 5, generator=random)

    old = -torch.rand(3, 5, generator=random) - 0.5
    garbage = torch.full((3, 5), float("nan"))
    return LossInputs(
        logprobs=torch.where(mask, around(old), 77.0).requires_grad_(),
        old_logprobs=torch.where(mask, old, -500.0),
        sampler_logprobs=torch.where(mask, around(old), garbage),
        ref_logprobs=torch.where(mask, around(old), garbage) if with_ref else None,
        advantages=torch.where(mask, torch.tensor([[1.5], [-0.7], [-1.2]]), garbage),
        mask=mask,
        entropy=torch.rand(3, 5, generator=random).requires_grad_(),
    )


def loop_grpo(x: LossInputs, low: float, high: float, kl_coef: float, dual: float | None, entropy_coef: float):
    """The clipped loss, token by token, with plain floats."""
    out = torch.zeros(3, 5)
    for i in range(3):
        for t in range(5):
            if not x.mask[i, t]:
                continue
            advantage = x.advantages[i, t].item()
            ratio = math.exp(x.logprobs[i, t].item() - x.old_logprobs[i, t].item())
            surrogate = min(advantage * ratio, advantage * min(max(ratio, 1 - low), 1 + high))
            if dual is not None and advantage < 0:
                surrogate = max(surrogate, dual * advantage)
            gap = x.ref_logprobs[i, t].item() - x.logprobs[i, t].item()
            kl = math.exp(gap) - gap - 1
            out[i, t] = -surrogate + kl_coef * kl - entropy_coef * x.entropy[i, t].item()
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_low": 0.1, "clip_high": 0.4},
        {"kl_coef": 0.3},
        {"dual_clip": 1.5},
        {"entropy_coef": 0.2},
        {"clip_low": 0.3, "clip_high": 0.1, "kl_coef": 0.05, "dual_clip": 2.0, "entropy_coef": 0.1},
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_equals_the_loop(options, seed):
    x = make_inputs(seed)
    full = {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coef": 0.0,
        "dual_clip": None,
        "entropy_coef": 0.0,
    } | options
    expected = loop_grpo(
        x, full["clip_low"], full["clip_high"], full["kl_coef"], full["dual_clip"], full["entropy_coef"]
    )
    loss, _ = grpo(**options)(x)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_reinforce_equals_the_loop():
    x = make_inputs()
    expected = torch.zeros(3, 5)
    for i in range(3):
        for t in range(5):
            if x.mask[i, t]:
                expected[i, t] = -x.advantages[i, t].item() * x.logprobs[i, t].item()
    loss, _ = reinforce()(x)
    torch.testing.assert_close(loss, expected)


def test_one_step_grpo_has_the_gradient_of_reinforce():
    x = make_inputs()
    on_policy = LossInputs(**{**vars(x), "old_logprobs": x.logprobs.detach()})
    (clipped,) = torch.autograd.grad(grpo()(on_policy)[0].sum(), x.logprobs)
    (plain,) = torch.autograd.grad(reinforce()(on_policy)[0].sum(), x.logprobs)
    torch.testing.assert_close(clipped, plain)


@pytest.mark.parametrize(
    "loss",
    [
        grpo(),
        grpo(kl_coef=0.1, entropy_coef=0.1, dual_clip=3.0),
        grpo(kl_coef=0.1, kl_estimator="k2"),
        reinforce(),
    ],
)
def test_untrained_tokens_get_neither_loss_nor_gradient(loss):
    x = make_inputs()
    per_token, metrics = loss(x)
    gradients = torch.autograd.grad(per_token.sum(), [x.logprobs, x.entropy], allow_unused=True)
    assert (per_token[~x.mask] == 0).all()
    assert torch.isfinite(per_token).all()
    assert gradients[0] is not None
    assert (gradients[0][x.mask] != 0).any()
    for gradient in gradients:
        assert gradient is None or (gradient[~x.mask] == 0).all()
    for value in metrics.values():
        assert isinstance(value, torch.Tensor)
        assert torch.isfinite(value[x.mask]).all()
        assert not value.requires_grad


def one_token(log_ratio: float, advantage: float) -> LossInputs:
    zero = torch.zeros(1, 1)
    return LossInputs(
        logprobs=torch.tensor([[log_ratio]], requires_grad=True),
        old_logprobs=zero,
        sampler_logprobs=zero,
        ref_logprobs=None,
        advantages=torch.tensor([[advantage]]),
        mask=torch.ones(1, 1, dtype=torch.bool),
        entropy=zero,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.25, 1.0, True),  # under 1 + clip_high
        (1.35, 1.0, False),  # over it: no more push upwards
        (0.85, -1.0, False),  # under 1 - clip_low: no more push downwards
        (0.95, -1.0, True),
        (0.5, 1.0, True),  # the wrong way: always pulled back
        (2.0, -1.0, True),
    ],
)
def test_clip_bounds_are_asymmetric(ratio, advantage, moves):
    x = one_token(math.log(ratio), advantage)
    per_token, metrics = grpo(clip_low=0.1, clip_high=0.3)(x)
    (gradient,) = torch.autograd.grad(per_token.sum(), x.logprobs)
    assert bool(gradient.item() != 0) == moves
    assert bool(metrics["clip_fraction"].item()) == (not moves)


def test_kl_estimators_are_zero_at_equality_and_k2_k3_never_negative():
    random = torch.Generator().manual_seed(0)
    p, q = -torch.rand(1000, generator=random) * 3, -torch.rand(1000, generator=random) * 3
    for estimator in (k1, k2, k3):
        assert (estimator(p, p) == 0).all()
    assert (k2(p, q) >= 0).all()
    assert (k3(p, q) >= 0).all()
    assert (k1(p, q) < 0).any()
    assert torch.isfinite(k3(torch.tensor([-900.0]), torch.tensor([0.0]))).all()


@pytest.mark.parametrize("estimator", [k1, k3])
def test_unbiased_kl_estimators_have_the_right_mean(estimator):
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.tensor([0.25, 0.25, 0.4, 0.1], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * estimator(p.log(), q.log())).sum(), exact)


def test_what_a_loss_cannot_have_is_said():
    with pytest.raises(LossError, match="kl_coef=0"):
        grpo(kl_coef=0.1)(make_inputs(with_ref=False))
    x = make_inputs()
    with pytest.raises(LossError, match="entropy"):
        grpo(entropy_coef=0.1)(LossInputs(**{**vars(x), "entropy": x.entropy.detach()}))
    for wrong in ({"clip_low": -0.1}, {"clip_high": -1.0}, {"dual_clip": 1.0}, {"kl_estimator": "k4"}):
        with pytest.raises(LossError):
            grpo(**wrong)


def test_resolve_names_and_values():
    assert resolve("grpo") == grpo()
    assert resolve("reinforce") == reinforce()
    mine = grpo(clip_high=0.28)
    assert resolve(mine) is mine
    with pytest.raises(LossError, match="grpo"):
        resolve("gpro")
    with pytest.raises(LossError, match=r"grpo\(\)"):
        resolve(grpo)
    with pytest.raises(LossError, match="int"):
        resolve(3)


def test_losses_are_values():
    loss = grpo(clip_high=0.28)
    assert "grpo(" in repr(loss)
    assert "clip_high=0.28" in repr(loss)
    assert pickle.loads(pickle.dumps(loss)) == loss
    assert hash(loss) == hash(grpo(clip_high=0.28))
    assert grpo(kl_coef=0.1).needs_reference
    assert not loss.needs_reference
