"""What all policy losses share: corrections, token filters, KL, entropy, anchor; and what they refuse."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rlbench.errors import LossError
from rlbench.rl import dppo_kl, dppo_tv
from rlbench.rl.clipped import decoupled_ppo, grpo, ppo
from rlbench.rl.covariance import clip_cov, kl_cov
from rlbench.rl.losses import NAMED
from rlbench.rl.sequence import gmpo, gspo, vespo
from rlbench.rl.types import LossInputs
from rlbench.rl.weighted import cispo, cpgd, dro, reinforce, sapo
from tests.rl import reference
from tests.rl.reference import make_inputs


@dataclass(frozen=True)
class Weights:
    """A correction by the contract: weights from the two log-probs, and a plan of the step's mean."""

    needs_plan: bool = False

    def plan(self, x: LossInputs) -> dict[str, torch.Tensor]:
        mean = x.old_logprobs[x.mask].mean()
        return {"weights.mean": mean.expand_as(x.old_logprobs)} if self.needs_plan else {}

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self.needs_plan:
            return (x.old_logprobs - x.channels["weights.mean"]).exp(), {}
        weights = (x.old_logprobs - x.sampler_logprobs).exp()
        return weights, {"mismatch_weight": weights}


@dataclass(frozen=True)
class Undecided:
    """A token filter by the contract: the tokens above the step's mean entropy, or above a given one."""

    above: float | None = None

    @property
    def needs_plan(self) -> bool:
        return self.above is None

    def plan(self, x: LossInputs) -> dict[str, torch.Tensor]:
        if self.above is not None:
            return {}
        return {"undecided.above": x.entropy[x.mask].mean().expand_as(x.entropy)}

    def __call__(self, x: LossInputs) -> torch.Tensor:
        above = x.channels["undecided.above"] if self.above is None else self.above
        return (x.entropy > above) & x.mask


ALL = [kind(anchor="old") for kind in NAMED.values() if kind is not decoupled_ppo]


@pytest.mark.parametrize("loss", ALL, ids=repr)
def test_corrections_and_filters_touch_the_policy_term_alone(loss):
    x = make_inputs(0, per_token=True)
    x = dataclasses.replace(x, channels=loss.plan(x))
    bare, _ = loss(x)
    full = dataclasses.replace(loss, mismatch=Weights(), tokens=Undecided(above=0.5), kl_coef=0.3, entropy_coef=0.2)
    per_token, metrics = full(x)
    v = reference.values(x)
    kept = (v["entropy"] > 0.5) & v["mask"]
    weights = np.exp(v["old"] - v["sampler"])
    gap = v["ref"] - v["new"]
    added = 0.3 * (np.exp(gap) - gap - 1) - 0.2 * v["entropy"]
    expected = np.where(kept, bare.detach().numpy() * weights, 0.0) + np.where(v["mask"], added, 0.0)
    np.testing.assert_allclose(per_token.detach().numpy(), expected, atol=1e-12)
    assert np.array_equal(metrics["tokens_kept"].numpy(), kept)
    assert {"mismatch_weight", "ref_kl", "ratio", "ppo_kl"} <= metrics.keys()
    kept_back = v["mask"] & ~kept
    (gradient,) = torch.autograd.grad((per_token - bare.detach() * 0).sum(), x.logprobs)
    # what was filtered out keeps the gradient of its KL (but for losses whose terms reach other tokens)
    if not isinstance(loss, gspo | gmpo):
        np.testing.assert_allclose(gradient.numpy()[kept_back], 0.3 * (1 - np.exp(gap))[kept_back], atol=1e-12)


@pytest.mark.parametrize("loss", [*ALL], ids=repr)
def test_plans_of_all_parts_come_together_and_splitting_changes_nothing(loss):
    full = dataclasses.replace(loss, mismatch=Weights(needs_plan=True), tokens=Undecided())
    assert full.needs_plan
    x = make_inputs(1, lengths=(5, 2, 0, 6, 3), per_token=True)
    planned = dataclasses.replace(x, channels=full.plan(x))
    assert {"weights.mean", "undecided.above"} <= planned.channels.keys()
    whole, _ = full(planned)
    torch.testing.assert_close(full(x)[0], whole)  # called by hand, it plans for itself
    parts = [full(reference.rows_of(planned, rows))[0] for rows in ([0, 1], [2], [3, 4])]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", ALL, ids=repr)
def test_only_losses_with_a_plan_ask_for_one(loss):
    assert loss.needs_plan == isinstance(loss, clip_cov | kl_cov)


@pytest.mark.parametrize("kind", NAMED.values(), ids=lambda kind: kind.__name__)
def test_the_anchor_is_what_the_ratio_is_taken_against(kind):
    if kind is decoupled_ppo:
        return
    x = make_inputs(2)
    moved = dataclasses.replace(x, old_logprobs=x.sampler_logprobs)
    anchored, _ = kind(anchor="sampler")(x)
    torch.testing.assert_close(anchored, kind(anchor="old")(moved)[0])


def test_decoupled_ppo_is_ppo_times_the_behaviour_weight():
    x = make_inputs(3)
    loss = decoupled_ppo(clip_high=0.1)
    v = reference.values(x)
    weights = np.minimum(np.exp(v["old"] - v["sampler"]), 5.0)
    np.testing.assert_allclose(loss(x)[0].detach().numpy(), weights * reference.surrogate(loss, x), atol=1e-12)
    far = dataclasses.replace(x, sampler_logprobs=x.old_logprobs - 3.0)  # a weight of e^3 is capped at 5
    np.testing.assert_allclose(loss(far)[0].detach().numpy(), 5.0 * reference.surrogate(loss, x), atol=1e-12)
    with pytest.raises(LossError, match="use ppo"):
        decoupled_ppo(mismatch=None)
    with pytest.raises(LossError, match="correct twice"):
        decoupled_ppo(anchor="sampler")


def test_the_kl_can_be_corrected_by_the_ratio_and_its_gradient_flows_through_both():
    x = make_inputs(4)
    loss = reinforce(kl_coef=1.0, kl_ratio_correction=True)
    np.testing.assert_allclose(loss(x)[0].detach().numpy(), reference.per_token(loss, x), atol=1e-12)


def test_a_loss_does_not_change_its_inputs():
    x = make_inputs(5)
    before = [getattr(x, name).detach().clone() for name in ("logprobs", "old_logprobs", "advantages")]
    for loss in ALL:
        loss(x)
    for name, value in zip(("logprobs", "old_logprobs", "advantages"), before, strict=True):
        assert torch.equal(getattr(x, name).detach().nan_to_num(), value.nan_to_num())


def test_old_logprobs_that_were_not_detached_take_no_gradient():
    x = make_inputs(6)
    attached = dataclasses.replace(x, old_logprobs=x.logprobs, sampler_logprobs=x.logprobs)
    (gradient,) = torch.autograd.grad(ppo()(attached)[0].sum(), x.logprobs)
    torch.testing.assert_close(gradient, torch.where(x.mask, -x.advantages, 0.0))


def test_the_clipped_tokens_are_counted_by_side():
    x = make_inputs(7, lengths=(40, 40, 40), spread=0.5, per_token=True)
    v = reference.values(x)
    ratio = np.exp(v["new"] - v["old"])
    high, low = (v["adv"] > 0) & (ratio > 1.2), (v["adv"] < 0) & (ratio < 0.8)
    assert high.any() and low.any()
    for loss in (ppo(), clip_cov(), cpgd()):
        _, metrics = loss(x)
        assert np.array_equal(metrics["clip_fraction"].numpy(), high | low)
        assert np.array_equal(metrics["clip_fraction_high"].numpy(), high)
        assert np.array_equal(metrics["clip_fraction_low"].numpy(), low)
    _, metrics = ppo(dual_clip=1.5)(x)
    assert np.array_equal(metrics["dual_clip_fraction"].numpy(), (v["adv"] < 0) & (ratio > 1.5))
    np.testing.assert_allclose(metrics["ppo_kl"].numpy(), v["old"] - v["new"])
    np.testing.assert_allclose(metrics["ratio"].numpy(), ratio)


WRONG_FIELDS = [
    (lambda: ppo(clip_low=-0.1), "clip_low=-0.1"),
    (lambda: ppo(clip_low=1.1), "clip_low=1.1"),
    (lambda: ppo(clip_high=-1.0), "clip_high=-1.0"),
    (lambda: ppo(clip_high=float("nan")), "clip_high=nan"),
    (lambda: ppo(clip_high="wide"), "clip_high='wide'"),
    (lambda: ppo(dual_clip=1.0), "dual_clip=1.0"),
    (lambda: ppo(delta=1.2), "delta=1.2"),
    (lambda: ppo(dual_clip=3.0, delta=3.0), "dual_clip"),
    (lambda: grpo(kl_estimator="k4"), "nearest: k"),
    (lambda: grpo(kl_coef=-1.0), "kl_coef=-1.0"),
    (lambda: grpo(entropy_coef=float("nan")), "entropy_coef=nan must be a number"),
    (lambda: grpo(anchor="odl"), "nearest: old"),
    (lambda: grpo(aggregation="token_mean"), "nearest: token-mean"),
    (lambda: grpo(anchor="sampler", mismatch=Weights()), "correct twice"),
    (lambda: gspo(level="tokens"), "nearest: token"),
    (lambda: gmpo(clip_low=-0.1), "clip_low=-0.1"),
    (lambda: vespo(k_neg=-1.0), "k_neg=-1.0"),
    (lambda: cispo(clip_high=-0.5), "clip_high=-0.5"),
    (lambda: sapo(tau_pos=0.0), "tau_pos=0.0"),
    (lambda: cpgd(clip_low=1.0), "clip_low=1.0"),
    (lambda: cpgd(drift_coef=-1.0), "drift_coef=-1.0"),
    (lambda: dro(beta=0.0), "beta=0.0"),
    (lambda: clip_cov(fraction=1.5), "fraction=1.5"),
    (lambda: clip_cov(low=5.0, high=1.0), "low=5.0"),
    (lambda: clip_cov(seed=0.5), "seed=0.5"),
    (lambda: kl_cov(coef=-1.0), "coef=-1.0"),
    (lambda: dppo_tv(delta_high=2.0), "delta_high=2.0"),
    (lambda: dppo_kl(cap=0.0), "cap=0.0"),
]


@pytest.mark.parametrize(("make", "said"), WRONG_FIELDS, ids=[said for _, said in WRONG_FIELDS])
def test_wrong_fields_are_refused_where_they_are_typed(make, said):
    with pytest.raises(LossError, match=said):
        make()
    with pytest.raises(ValueError):
        make()


@pytest.mark.parametrize("loss", ALL, ids=repr)
def test_wrong_inputs_are_refused_with_argument_and_shapes(loss):
    x = make_inputs(0)
    narrow = x.old_logprobs[:, :4]
    with pytest.raises(LossError, match=r"old_logprobs has shape \(3, 4\); wanted \(3, 5\)"):
        loss(dataclasses.replace(x, old_logprobs=narrow))
    with pytest.raises(LossError, match="the batch is empty"):
        loss(reference.rows_of(x, []))
    with pytest.raises(LossError, match=r"group has shape \(2,\); wanted \(3,\)"):
        loss(dataclasses.replace(x, group=torch.zeros(2)))
    with pytest.raises(LossError, match="kl_coef=0"):
        dataclasses.replace(loss, kl_coef=0.1)(make_inputs(0, ref=False))
    with pytest.raises(LossError, match="entropy_coef has no effect"):
        dataclasses.replace(loss, entropy_coef=0.1)(dataclasses.replace(x, entropy=x.entropy.detach()))
