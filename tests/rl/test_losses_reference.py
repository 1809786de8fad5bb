"""Every policy loss against hand-computed values, slow loops and finite differences."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.rl import dppo_kl, dppo_tv
from rlbench.rl.clipped import dapo, ppo
from rlbench.rl.covariance import clip_cov, kl_cov
from rlbench.rl.losses import NAMED
from rlbench.rl.policy import PolicyLoss
from rlbench.rl.sequence import gmpo, gspo, luspo, vespo
from rlbench.rl.types import LossInputs
from rlbench.rl.weighted import cispo, cpgd, dro, importance_sampling, sapo
from tests.rl import reference
from tests.rl.reference import make_inputs

# Besides the defaults: every option of each loss away from its default, wide enough to act on random inputs.
VARIANTS: list[PolicyLoss] = [
    ppo(clip_low=0.1, clip_high=0.4, dual_clip=1.5),
    ppo(clip_low=0.3, clip_high=0.1, delta=1.3),
    dapo(dual_clip=1.05),
    gspo(clip_low=0.05, clip_high=0.1),
    gspo(level="token", clip_low=0.05, clip_high=0.1, dual_clip=1.2),
    luspo(level="token"),
    gmpo(clip_low=0.05, clip_high=0.1),
    vespo(k_pos=1.0, lambda_pos=0.5, k_neg=0.5, lambda_neg=0.1),
    vespo(k_pos=0.1, lambda_pos=0.0, k_neg=0.05, lambda_neg=0.0),
    cispo(clip_low=0.1, clip_high=0.2),
    sapo(tau_pos=2.0, tau_neg=3.0),
    cpgd(clip_low=0.1, clip_high=0.3, drift_coef=0.5),
    dro(beta=2.0),
    importance_sampling(anchor="old"),
    dppo_tv(delta_low=0.02, delta_high=0.05, cap=1.2),
    dppo_tv(anchor="old", delta_low=0.05, delta_high=0.02),
    dppo_kl(delta_low=0.01, delta_high=0.001, cap=1.3),
    kl_cov(fraction=0.3, coef=0.7),
]
OTHERS = [kind for name, kind in NAMED.items() if name not in ("clip_cov", "decoupled_ppo")]
LOSSES = [kind() for kind in OTHERS] + VARIANTS


def close(tensor: torch.Tensor, array: np.ndarray, tolerance: float = 1e-9) -> None:
    scale = 1 + np.abs(array)
    assert np.isfinite(tensor.detach().numpy()).all()
    np.testing.assert_array_less(np.abs(tensor.detach().double().numpy() - array) / scale, tolerance)


def token(log_ratio: float, advantage: float, old: float = 0.0, **changes: object) -> LossInputs:
    """One token; old and sampler log-probability alike."""

    def cell(value: float) -> torch.Tensor:
        return torch.tensor([[value]], dtype=torch.float64)

    x = LossInputs(
        logprobs=cell(old + log_ratio).requires_grad_(),
        old_logprobs=cell(old),
        sampler_logprobs=cell(old),
        ref_logprobs=None,
        advantages=cell(advantage),
        mask=torch.ones(1, 1, dtype=torch.bool),
        entropy=cell(0.0),
    )
    return dataclasses.replace(x, **changes)


LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("loss", "log_ratio", "advantage", "old", "expected", "slope"),
    [
        # ratio 2 and 1/2 against clips of 0.2
        (ppo(), LOG2, 1.0, 0.0, -1.2, 0.0),
        (ppo(), LOG2, -1.0, 0.0, 2.0, 2.0),
        (ppo(), -LOG2, 1.0, 0.0, -0.5, -0.5),
        (ppo(), -LOG2, -1.0, 0.0, 0.8, 0.0),
        (ppo(dual_clip=1.5), LOG2, -1.0, 0.0, 1.5, 0.0),
        (ppo(dual_clip=3.0), LOG2, -1.0, 0.0, 2.0, 2.0),
        (ppo(delta=1.5), LOG2, -1.0, 0.0, 1.5, 0.0),
        (ppo(delta=1.5), LOG2, 1.0, 0.0, -1.2, 0.0),
        (NAMED["dapo"](), math.log(1.25), 1.0, 0.0, -1.25, -1.25),
        (NAMED["grpo"](), math.log(1.25), 1.0, 0.0, -1.2, 0.0),
        (gspo(clip_high=0.5), math.log(1.4), 2.0, 0.0, -2.8, -2.8),
        (gspo(), math.log(1.4), 2.0, 0.0, -2.0008, 0.0),
        (gmpo(), LOG2, 1.0, 0.0, -math.exp(0.4), 0.0),
        (gmpo(), -LOG2, 1.0, 0.0, -0.5, -0.5),
        (gmpo(), -LOG2, -1.0, 0.0, math.exp(-0.4), 0.0),
        (vespo(), LOG2, 1.0, -LOG2, 0.0, -4 * math.exp(-3)),  # log p is 0
        (vespo(), LOG2, -1.0, -1 - LOG2, -8 * math.exp(-2), 8 * math.exp(-2)),  # log p is -1
        (cispo(), LOG2, 1.0, -1 - LOG2, 2.0, -2.0),
        (cispo(), math.log(8), 1.0, -1 - math.log(8), 5.0, -5.0),
        (sapo(), 0.0, 1.0, 0.0, -2.0, -1.0),
        (sapo(tau_neg=2.0), 0.0, -1.0, 0.0, 1.0, 1.0),
        (sapo(), LOG2, 1.0, 0.0, -4 / (1 + math.exp(-1)), -8 * math.exp(-1) / (1 + math.exp(-1)) ** 2),
        (cpgd(), LOG2, 2.0, -1.0, -2 * (-1 + math.log(1.2)), 0.0),
        (cpgd(), LOG2, -2.0, -1.0, 2 * (-1 + LOG2), 2.0),
        (cpgd(), -LOG2, -2.0, -1.0, 2 * (-1 + math.log(0.8)), 0.0),
        (cpgd(drift_coef=1.0), LOG2, 2.0, -1.0, -2 * (-1 + math.log(1.2)) + 1 - LOG2, 1.0),
        (NAMED["reinforce"](), LOG2, 2.0, -1.0, -2 * (-1 + LOG2), -2.0),
        (NAMED["gpg"](), LOG2, 2.0, -1.0, -2 * (-1 + LOG2), -2.0),
        (importance_sampling(), LOG2, 3.0, -1.0, -6.0, -6.0),
        (dro(beta=0.5), 2.0, 3.0, -1.0, -(3.0 - 1.0), -(3.0 - 1.0)),
        (dppo_tv(), math.log(1.5), 1.0, -LOG2, 0.0, 0.0),  # p goes from 0.5 to 0.75
        (dppo_tv(), math.log(1.5), -1.0, -LOG2, 1.5 * math.log(0.75), 1.5),
        (dppo_tv(), math.log(30), 1.0, math.log(0.001), -20 * math.log(0.03), -20.0),
        (dppo_kl(), math.log(1.5), 1.0, -LOG2, 0.0, 0.0),  # KL(0.5 || 0.75) is 0.1438 nats
        (dppo_kl(delta_high=0.1439), math.log(1.5), 1.0, -LOG2, -1.5 * math.log(0.75), -1.5),
        (dppo_kl(delta_high=0.1438), math.log(1.5), 1.0, -LOG2, 0.0, 0.0),
        (kl_cov(), LOG2, 1.0, -1.0, -2.0 + LOG2, -2.0 + 1.0),
    ],
)
def test_hand_computed_values(loss, log_ratio, advantage, old, expected, slope):
    x = token(log_ratio, advantage, old)
    per_token, _ = loss(x)
    (gradient,) = torch.autograd.grad(per_token.sum(), x.logprobs)
    assert per_token.item() == pytest.approx(expected, abs=1e-6)
    assert gradient.item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("per_token", [False, True])
def test_losses_equal_the_slow_loops(loss, per_token):
    for seed in range(3):
        x = make_inputs(seed, lengths=(6, 0, 1, 4), per_token=per_token)
        close(loss(x)[0], reference.per_token(loss, x))


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_log_ratios_of_fifty_are_finite_and_equal_the_loops(loss):
    for lengths in ((1,) * 8, (7, 3, 20)):
        x = make_inputs(0, lengths, spread=50.0, per_token=True, holes=False)
        per_token, _ = loss(x)
        (gradient,) = torch.autograd.grad(per_token.sum(), x.logprobs)
        assert torch.isfinite(gradient).all()
        close(per_token, reference.per_token(loss, x), 1e-7)
        single = make_inputs(0, lengths, spread=50.0, per_token=True, holes=False, dtype=torch.float32)
        per_token, _ = loss(single)
        (gradient,) = torch.autograd.grad(per_token.sum(), single.logprobs)
        assert torch.isfinite(per_token).all() and torch.isfinite(gradient).all()


@settings(max_examples=25, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    spread=st.sampled_from([0.05, 1.0, 50.0]),
    outside=st.sampled_from([float("nan"), float("inf"), -1e30]),
    pick=st.integers(0, len(LOSSES) - 1),
)
def test_any_ragged_batch_equals_the_loops_and_stays_finite(seed, lengths, spread, outside, pick):
    x = make_inputs(seed, tuple(lengths), spread=spread, per_token=bool(seed % 2), outside=outside)
    for loss in (LOSSES[pick], dataclasses.replace(LOSSES[pick], kl_coef=0.3, entropy_coef=0.1)):
        per_token, metrics = loss(x)
        expected = reference.per_token(loss, x)
        close(per_token, expected, 1e-7)
        gradients = torch.autograd.grad(per_token.sum(), [x.logprobs, x.entropy], allow_unused=True)
        for gradient in gradients:
            assert gradient is None or torch.isfinite(gradient).all()
            assert gradient is None or (gradient[~x.mask] == 0).all()
        assert (per_token[~x.mask] == 0).all()
        for name, value in metrics.items():
            assert value.shape == x.mask.shape and not value.requires_grad, name
            assert torch.isfinite(value[x.mask]).all(), name


def smooth(loss: PolicyLoss) -> bool:
    """Whether its gradient is the derivative of its value: no stop-gradient inside."""
    stopped = ("cispo", "vespo", "dppo_tv", "dppo_kl")
    return loss.name not in stopped and getattr(loss, "level", "sequence") == "sequence"


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if smooth(loss)], ids=repr)
def test_gradients_are_those_of_finite_differences(loss):
    x = make_inputs(3, lengths=(4, 2, 0), outside=-1.0)
    channels = loss.plan(x)  # fixed, as within a step
    whole = dataclasses.replace(loss, kl_coef=0.2, kl_estimator="k2", entropy_coef=0.1, kl_ratio_correction=True)

    def of(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return whole(dataclasses.replace(x, logprobs=logprobs, entropy=entropy, channels=channels))[0]

    assert torch.autograd.gradcheck(of, (x.logprobs, x.entropy))


@pytest.mark.parametrize(
    "loss", [cispo(clip_high=0.1), vespo(), dppo_tv(delta_high=0.05), dppo_kl(delta_low=0.01)], ids=repr
)
def test_weighted_losses_have_the_gradient_of_their_frozen_weight(loss):
    x = make_inputs(4, per_token=True)
    per_token, _ = loss(x)
    (gradient,) = torch.autograd.grad(per_token.sum(), x.logprobs)
    close(torch.where(x.mask, gradient * x.logprobs, 0.0), reference.surrogate(loss, x))


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_both_levels_of_gspo_have_one_gradient_under_their_aggregation(level):
    x = make_inputs(5, holes=False)
    loss = gspo(level=level, clip_low=0.5, clip_high=0.5)
    lengths = x.mask.sum(1, keepdim=True)
    (gradient,) = torch.autograd.grad((loss(x)[0] / lengths).sum(), x.logprobs)
    for i, length in enumerate(lengths.flatten().tolist()):
        s = math.exp(float((x.logprobs - x.old_logprobs)[i, :length].detach().mean()))
        wanted = -float(x.advantages[i, 0]) * s / length
        assert gradient[i, :length].tolist() == pytest.approx([wanted] * length)


def test_the_token_level_of_gspo_gives_each_token_its_own_advantage():
    x = make_inputs(5, holes=False, per_token=True)
    v, mask = reference.values(x), x.mask.numpy()
    s = np.exp((v["new"] - v["old"]).sum(1) / mask.sum(1))[:, None]
    (by_token,) = torch.autograd.grad(gspo(level="token", clip_low=1.0, clip_high=9.0)(x)[0].sum(), x.logprobs)
    close(by_token, -v["adv"] * s * mask)
    (by_sequence,) = torch.autograd.grad(gspo(clip_low=1.0, clip_high=9.0)(x)[0].sum(), x.logprobs)
    close(by_sequence, -v["adv"].sum(1)[:, None] / mask.sum(1)[:, None] * s * mask)


def test_luspo_is_gspo_times_the_length():
    x = make_inputs(6, holes=False)
    bounds = {"clip_low": 0.01, "clip_high": 0.02}
    per_sequence = (gspo(**bounds)(x)[0] / x.mask.sum(1, keepdim=True)).sum(1)
    summed = luspo(**bounds)(x)[0].sum(1)
    torch.testing.assert_close(summed, per_sequence * x.mask.sum(1))


ON_POLICY = [kind for name, kind in NAMED.items() if name not in ("clip_cov", "sft")]


@pytest.mark.parametrize("kind", ON_POLICY, ids=lambda kind: kind.__name__)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(kind):
    loss, x = kind(), make_inputs(7)
    same = x.logprobs.detach()
    x = dataclasses.replace(x, old_logprobs=same, sampler_logprobs=same)
    per_token, metrics = loss(x)
    lengths = x.mask.sum(1, keepdim=True)
    (gradient,) = torch.autograd.grad((per_token / lengths).sum(), x.logprobs)
    close(torch.where(x.mask, gradient * lengths, 0.0), -reference.values(x)["adv"])
    assert metrics["ratio"][x.mask].tolist() == pytest.approx([1.0] * int(x.mask.sum()))
    assert not metrics.get("clip_fraction", torch.zeros(1)).any()


@pytest.mark.parametrize("loss", [*LOSSES, clip_cov(fraction=0.3, low=-1.0)], ids=repr)
def test_padding_and_the_order_of_sequences_change_nothing(loss):
    x = make_inputs(8, lengths=(5, 0, 3, 6), per_token=True)
    per_token, _ = loss(x)
    order = [2, 0, 3, 1]
    torch.testing.assert_close(loss(reference.rows_of(x, order))[0], per_token[order], rtol=1e-12, atol=1e-12)

    def padded(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, 4), value=value)

    wide = LossInputs(
        **{
            name: padded(getattr(x, name), float("nan"))
            for name in (
                "logprobs",
                "old_logprobs",
                "sampler_logprobs",
                "ref_logprobs",
                "advantages",
                "entropy",
            )
        },
        mask=padded(x.mask, False),
    )
    torch.testing.assert_close(loss(wide)[0][:, :6], per_token, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_narrow_inputs_are_computed_in_float32(loss, dtype):
    x = make_inputs(9, dtype=dtype)
    per_token, _ = loss(x)
    assert per_token.dtype == torch.float32
    close(per_token, reference.per_token(loss, x), 2e-4)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_a_batch_without_trained_tokens_is_zero(loss):
    x = make_inputs(0, lengths=(0, 0))
    per_token, _ = loss(x)
    (gradient,) = torch.autograd.grad(per_token.sum(), x.logprobs, allow_unused=True)
    assert (per_token == 0).all()
    assert gradient is None or (gradient == 0).all()
