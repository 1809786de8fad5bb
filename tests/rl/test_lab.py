"""Per-token coefficients against closed forms and finite differences; and what compares them."""

import dataclasses
import math

import pytest
import torch

from rlbench import rl
from rlbench.errors import LossError
from rlbench.rl import lab
from rlbench.rl.aggregate import Aggregation, BatchTotals
from rlbench.rl.lab import coefficients, coefficients_of_all, cosines, norm_ratios, ratio_curve, variants
from rlbench.rl.losses import NAMED
from rlbench.trainers.passes.loss_value import evaluate
from tests.rl.reference import make_inputs

RATIOS = torch.linspace(0.05, 3.0, 60, dtype=torch.float64)
DETACHED = ("vespo", "cispo", "dppo_tv", "dppo_kl")
"""Losses with a weight that carries no gradient: their value does not move as their gradient says."""


def inputs(seed=0, **options):
    return make_inputs(seed, per_token=True, outside=0.0, **options)


def weights_of(x, mode="token-mean"):
    return Aggregation(mode).weights(x.mask, BatchTotals.of(x.mask, x.group), x.group).double()


def plain(x):
    return {name: getattr(x, name).detach() for name in ("logprobs", "old_logprobs", "advantages")}


# -- closed forms


def test_ppo_pulls_with_minus_advantage_times_ratio_inside_the_clip_range_and_not_at_all_outside():
    x = inputs(spread=0.4, lengths=(40, 30, 20))
    v = plain(x)
    ratio, advantage = (v["logprobs"] - v["old_logprobs"]).exp(), v["advantages"]
    out = ((ratio > 1.2) & (advantage > 0)) | ((ratio < 0.8) & (advantage < 0))
    assert 10 < int(out[x.mask].sum()) < int(x.mask.sum()) - 10
    found = coefficients(rl.ppo(), x)
    expected = torch.where(out | ~x.mask, 0.0, -advantage * ratio * weights_of(x))
    torch.testing.assert_close(found.logprobs, expected, rtol=1e-12, atol=1e-15)
    assert found.metrics["clip_fraction"] == pytest.approx(float(out[x.mask].double().mean()))
    assert found.entropy is None and found.aggregation == "token-mean"


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-mean", "prompt-mean"])
def test_reinforce_pulls_with_minus_the_advantage_times_the_weight_of_the_aggregation(mode):
    x = inputs()
    found = coefficients(rl.reinforce(), x, mode)
    weights = weights_of(x, mode)
    torch.testing.assert_close(found.logprobs, torch.where(x.mask, -x.advantages * weights, 0.0), rtol=1e-12, atol=0)
    value = torch.where(x.mask, -x.advantages * x.logprobs.detach() * weights, 0.0).sum()
    assert found.value == pytest.approx(float(value), rel=1e-12) and found.aggregation == mode


@pytest.mark.parametrize(
    ("estimator", "pull"),
    [
        ("k1", lambda gap: torch.ones_like(gap)),
        ("k2", lambda gap: gap),
        ("k3", lambda gap: 1 - (-gap).exp()),
        ("k3+", lambda gap: gap),
    ],
)
def test_a_kl_penalty_adds_its_own_derivative(estimator, pull):
    x = dataclasses.replace(inputs(), advantages=torch.zeros_like(inputs().advantages))
    found = coefficients(rl.ppo(kl_coef=0.3, kl_estimator=estimator), x)
    gap = x.logprobs.detach() - x.ref_logprobs
    torch.testing.assert_close(found.logprobs, torch.where(x.mask, 0.3 * pull(gap) * weights_of(x), 0.0))


def test_an_entropy_bonus_is_a_coefficient_of_its_own():
    x = inputs()
    with_bonus, without = coefficients(rl.grpo(entropy_coef=0.02), x), coefficients(rl.grpo(), x)
    assert torch.equal(with_bonus.logprobs, without.logprobs) and without.entropy is None
    expected = torch.where(x.mask, -0.02 * weights_of(x, "seq-mean-token-mean"), 0.0)
    torch.testing.assert_close(with_bonus.entropy, expected)


@pytest.mark.parametrize("name", [name for name in NAMED if name not in DETACHED])
def test_coefficients_are_the_slope_of_the_value(name):
    loss, x = NAMED[name](), inputs(seed=3)
    found = coefficients(loss, x)
    for row, column in x.mask.nonzero().tolist():
        values = []
        for step in (1e-6, -1e-6):
            moved = x.logprobs.detach().clone()
            moved[row, column] += step
            values.append(coefficients(loss, dataclasses.replace(x, logprobs=moved)).value)
        slope = (values[0] - values[1]) / 2e-6
        assert float(found.logprobs[row, column]) == pytest.approx(slope, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", NAMED)
def test_they_are_what_a_training_step_backpropagates(name):
    loss, x = NAMED[name](), inputs(dtype=torch.float32)
    found = coefficients(loss, x)
    planned = dataclasses.replace(x, channels=loss.plan(x)) if loss.needs_plan else x
    weights = Aggregation(loss.aggregation).weights(x.mask, BatchTotals.of(x.mask, x.group), x.group)
    total, _ = evaluate(loss, planned, weights)
    (gradient,) = torch.autograd.grad(total, [x.logprobs])
    torch.testing.assert_close(found.logprobs, gradient)
    assert found.value == pytest.approx(float(total.detach()), rel=1e-6)


# -- what must not matter


@pytest.mark.parametrize("name", NAMED)
def test_padding_and_the_order_of_rows_do_not_matter(name):
    loss, x = NAMED[name](), inputs(lengths=(6, 2, 5, 4))
    whole = coefficients(loss, x)
    order = torch.tensor([2, 0, 3, 1])

    def wider(value):
        more = torch.full((value.shape[0], 3), math.nan, dtype=value.dtype)
        return torch.cat([value.detach(), more], 1)[order]

    fields = {
        f.name: wider(getattr(x, f.name))
        for f in dataclasses.fields(x)
        if f.name not in ("mask", "group", "channels") and getattr(x, f.name) is not None
    }
    mask = torch.nn.functional.pad(x.mask, (0, 3))[order]
    other = dataclasses.replace(x, mask=mask, group=x.group[order], **fields)
    found = coefficients(loss, other, totals=BatchTotals.of(x.mask, x.group))
    torch.testing.assert_close(found.logprobs[:, :6], whole.logprobs[order], rtol=1e-9, atol=1e-12)
    assert bool((found.logprobs[:, 6:] == 0).all())
    assert found.value == pytest.approx(whole.value, rel=1e-9)


def test_callers_mode_and_tensors_stay_as_they_are():
    x = inputs()
    with torch.no_grad():
        found = coefficients(rl.grpo(), x)
    assert bool(found.logprobs.any()) and x.logprobs.grad is None and not found.logprobs.requires_grad


# -- losses of all kinds


def mine(x, beta=1.0):
    return -beta * x.advantages * x.logprobs, {"beta": beta, "size": x.advantages.abs()}


def test_a_plain_function_works_and_its_metrics_become_numbers():
    x = inputs()
    found = coefficients(mine, x)
    torch.testing.assert_close(found.logprobs, coefficients(rl.reinforce(), x).logprobs)
    assert found.metrics == {"beta": 1.0, "size": pytest.approx(float(x.advantages[x.mask].abs().mean()))}


def test_a_loss_that_looks_at_the_whole_step_is_planned_first_without_gradient():
    seen = []

    class Above:
        needs_plan = True

        def plan(self, whole):
            seen.append((whole.logprobs.requires_grad, torch.is_grad_enabled()))
            middle = whole.entropy[whole.mask].median()
            return {"kept": (whole.entropy >= middle).double()}

        def __call__(self, x):
            return -x.advantages * x.logprobs * x.channels["kept"], {}

    x = inputs()
    found = coefficients(Above(), x)
    kept = x.entropy.detach() >= x.entropy.detach()[x.mask].median()
    assert seen == [(False, False)]
    assert torch.equal(found.logprobs != 0, kept & x.mask)


def test_a_loss_that_fails_is_named_with_the_users_line_and_the_others_come():
    def broken(x):
        return x.nothing, {}

    found, failed = coefficients_of_all({"a": rl.grpo(), "b": broken, "c": mine}, inputs())
    assert list(found) == ["a", "c"] and list(failed) == ["b"]
    assert "`b` raised AttributeError" in str(failed["b"])
    assert "test_lab.py" in failed["b"].user_line and "return x.nothing, {}" in failed["b"].user_line


def test_a_loss_that_lets_untrained_tokens_in_is_told_from_one_that_does_not():
    x = inputs(holes=True)
    assert not x.mask.all()
    found = coefficients(lambda x: (-x.advantages * x.logprobs.sum(1, keepdim=True), {}), x)
    assert found.leaks and bool((found.logprobs[~x.mask] == 0).all()) and bool(found.logprobs.any())
    assert not coefficients(mine, make_inputs(0, outside=math.nan)).leaks


def test_a_loss_that_writes_into_its_inputs_harms_no_other():
    def greedy(x):
        x.advantages.mul_(100.0)
        return -x.advantages * x.logprobs, {}

    x = inputs()
    alone = coefficients(rl.grpo(), x)
    found, _ = coefficients_of_all({"greedy": greedy, "grpo": rl.grpo()}, x)
    assert torch.equal(found["grpo"].logprobs, alone.logprobs)


def overwriting(x):
    ratio = (x.logprobs - x.old_logprobs).exp()
    loss = ratio * ratio
    ratio.zero_()
    return loss, {}


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda x: x.logprobs, "wanted .per_token, metrics"),
        (lambda x: (x.logprobs.sum(-1), {}), r"per-token shape \(3,\), wanted \(3, 5\)"),
        (lambda x: (x.old_logprobs, {}), "gives the log-probs no gradient"),
        (lambda x: (x.entropy * 1.0, {}), "gives the log-probs no gradient"),
        (lambda x: (x.logprobs / 0.0, {}), r"not finite on \d+ of \d+ trained"),
        (
            lambda x: ((x.logprobs - x.logprobs.detach()).abs().sqrt(), {}),
            "gradient of `it`.* log-probs is not finite",
        ),
        (overwriting, r"gradient of `it` cannot be computed: .*inplace"),
        (lambda x: (x.logprobs, {"m": torch.zeros(7)}), r"metric 'm' is \(7,\)"),
    ],
)
def test_what_is_no_loss_is_refused(loss, said):
    with pytest.raises(LossError, match=said):
        coefficients(loss, inputs(), name="it")


# -- several losses


def test_cosine_and_norm_ratio_of_coefficients():
    one, other = torch.tensor([[3.0, 0.0], [4.0, 0.0]]), torch.tensor([[0.0, 0.0], [-2.0, 0.0]])
    found = cosines([one, other, torch.zeros(2, 2)])
    torch.testing.assert_close(found[:2, :2], torch.tensor([[1.0, -0.8], [-0.8, 1.0]], dtype=torch.float64))
    assert bool(found[2].isnan().all()) and bool(found[:, 2].isnan().all())
    ratios = norm_ratios([one, other])
    torch.testing.assert_close(ratios, torch.tensor([[1.0, 2.5], [0.4, 1.0]], dtype=torch.float64))


def test_shares_are_of_the_size_of_trained_coefficients():
    coefficient = torch.tensor([[1.0, -3.0, 99.0], [-4.0, 0.0, 2.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    labels = torch.tensor([[0, 1, 0], [0, 2, 1]])
    assert lab.shares(coefficient, labels, mask, 4).tolist() == [0.5, 0.5, 0.0, 0.0]
    assert lab.shares(coefficient * 0, labels, mask, 4).tolist() == [0.0] * 4


def test_turns_are_runs_of_trained_tokens():
    mask = torch.tensor([[1, 1, 0, 0, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1, 0, 0]]).bool()
    turns = lab.turns_of(mask)
    assert turns[mask].tolist() == [0, 0, 1, 2, 0, 0, 0, 0]
    assert turns[0].tolist() == [0, 0, 0, 0, 1, 1, 2, 2] and not turns[1].any()


# -- what if the ratio were r


def test_the_curve_of_a_clipped_loss_ends_at_its_bounds():
    curve = ratio_curve(rl.dapo(), RATIOS)
    up, down = curve.coefficient
    torch.testing.assert_close(up, torch.where(RATIOS > 1.28, 0.0, -RATIOS))
    torch.testing.assert_close(down, torch.where(RATIOS < 0.8, 0.0, RATIOS))
    torch.testing.assert_close(curve.loss[0], -RATIOS.clamp(max=1.28))
    torch.testing.assert_close(curve.loss[1], RATIOS.clamp(min=0.8))
    assert curve.advantages == (1.0, -1.0) and torch.equal(curve.ratios, RATIOS)


def test_a_kl_penalty_bends_the_curve_back_to_ratio_1():
    bent, straight = (ratio_curve(rl.ppo(kl_coef=c, kl_estimator="k2"), RATIOS).coefficient for c in (0.5, 0.0))
    torch.testing.assert_close(bent - straight, 0.5 * RATIOS.log().expand(2, -1))


def test_a_token_of_the_curve_sees_no_other():
    def centred(x):
        return -((x.logprobs - x.logprobs.detach().mean()) ** 2) - x.advantages * x.logprobs, {}

    curve = ratio_curve(centred, RATIOS, (2.0,))
    torch.testing.assert_close(curve.coefficient, torch.full((1, len(RATIOS)), -2.0, dtype=torch.float64))
    alone = ratio_curve(rl.grpo(tokens=rl.high_entropy(fraction=0.2)), RATIOS)  # one token: its own top fifth
    torch.testing.assert_close(alone.coefficient, ratio_curve(rl.grpo(), RATIOS).coefficient)


@pytest.mark.parametrize("name", NAMED)
def test_every_loss_has_a_curve(name):
    curve = ratio_curve(NAMED[name](), RATIOS.float())
    assert curve.coefficient.shape == curve.loss.shape == (2, len(RATIOS))


def test_the_token_of_a_curve_is_one_that_can_exist():
    with pytest.raises(LossError, match="old_logprob"):
        ratio_curve(rl.ppo(), RATIOS, old_logprob=-0.5)
    with pytest.raises(LossError, match="ratios"):
        ratio_curve(rl.ppo(), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("loss", [rl.dpo(), rl.simpo(), rl.bradley_terry()])
def test_a_loss_of_pairs_has_no_curve_of_one_token_and_says_why(loss):
    with pytest.raises(LossError, match="compares two responses"):
        ratio_curve(loss, RATIOS)


# -- one hyper-parameter


def test_a_loss_value_is_swept_over_a_field_and_what_it_refuses_is_said():
    made, failed = variants(rl.grpo(kl_coef=0.1), "clip_high", [0.1, 0.4, -1.0])
    assert made == {f"clip_high={v}": rl.grpo(kl_coef=0.1, clip_high=v) for v in (0.1, 0.4)}
    assert list(failed) == ["clip_high=-1.0"] and "must be >= 0" in str(failed["clip_high=-1.0"])


def test_a_function_is_swept_over_a_parameter_and_keeps_what_it_declares():
    def summed(x, beta=1.0):
        return mine(x, beta)

    summed.aggregation = "token-sum"
    made, failed = variants(summed, "beta", [0.5, 2.0])
    x = inputs()
    found, _ = coefficients_of_all(made, x)
    assert not failed and {f.aggregation for f in found.values()} == {"token-sum"}
    torch.testing.assert_close(found["beta=2.0"].logprobs, 4 * found["beta=0.5"].logprobs)


@pytest.mark.parametrize(
    ("loss", "field", "values", "said"),
    [
        (rl.grpo(), "clip_hihg", [1], "no 'clip_hihg' to sweep over; nearest: clip_high"),
        (mine, "bta", [1], "`mine` has no 'bta'.*nearest: beta"),
        (lambda x: (x.logprobs, {}), "beta", [1], "give the function a parameter"),
        (mine, "x", [1], "has no 'x'"),
        (mine, "beta", [1, 1], "beta=1 is given twice"),
    ],
)
def test_what_cannot_be_swept_is_refused(loss, field, values, said):
    with pytest.raises(LossError, match=said):
        variants(loss, field, values)
