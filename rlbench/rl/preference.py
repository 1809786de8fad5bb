"""Losses from preferences: which of two responses is better (DPO and its kin), or whether one is good (KTO).

They take one log-probability per sequence, summed over its response tokens (`sequence_logprobs`), and return one
loss per pair (B,), or per response for KTO, not averaged. The metrics are (B,) without gradient: `reward_chosen`
and `reward_rejected` (the implicit rewards), `reward_margin`, and `reward_accuracy` (1 where the chosen one has the
higher reward). Losses with a reference policy are called with (chosen, rejected, ref_chosen, ref_rejected), those
without one with (chosen, rejected).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlbench.errors import LossError
from rlbench.rl.policy import Metrics, masked
from rlbench.rl.reward_checks import Checked, check_mask, check_shape, output_dtype, wide_rows, within


def sequence_logprobs(logprobs: Tensor, mask: Tensor, average: bool = False) -> Tensor:
    """Return the sum of each sequence's trained log-probabilities, (B,), or their mean (SimPO, ORPO; IPO in TRL)."""
    check_mask(mask)
    check_shape("logprobs", logprobs, tuple(mask.shape))
    summed = masked(logprobs.to(output_dtype(logprobs)), mask).sum(dim=1)
    return summed / mask.sum(dim=1).clamp(min=1) if average else summed


@dataclass(frozen=True)
class dpo(Checked):
    """Direct preference optimisation (arXiv 2305.18290).

    x = (chosen - rejected) - (ref_chosen - ref_rejected);
    L = -(1 - s) log sigmoid(beta x) - s log sigmoid(-beta x). With s > 0 it is conservative DPO (E. Mitchell, "A note
    on DPO with noisy preferences", 2023); with `robust` that loss made unbiased under flipped labels,
    ((1 - s) l(x) - s l(-x)) / (1 - 2 s) with l = -log sigmoid(beta x) (arXiv 2403.00409).

    Attributes:
        beta: strength of the pull to the reference policy, > 0.
        label_smoothing: s, the probability that a label is wrong, in [0, 0.5).
        robust: see above; needs label_smoothing > 0.
    """

    beta: float = within(0.1, 0.0, above=True)
    label_smoothing: float = 0.0
    robust: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5:
            raise LossError(f"dpo: label_smoothing={self.label_smoothing!r} must lie in [0, 0.5).")
        if self.robust and self.label_smoothing == 0:
            raise LossError("dpo: robust=True has no effect with label_smoothing=0; set it above 0.")

    def __call__(
        self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Return the loss per pair (B,) and the metrics; all four arguments are (B,) summed log-probabilities."""
        c, r = _log_ratios(chosen, rejected, ref_chosen, ref_rejected)
        right, wrong = -logsigmoid(self.beta * (c - r)), -logsigmoid(-self.beta * (c - r))
        s = self.label_smoothing
        if self.robust:
            loss = ((1 - s) * right - s * wrong) / (1 - 2 * s)
        else:
            loss = (1 - s) * right + s * wrong
        return loss, _pair_metrics(self.beta * c, self.beta * r)


@dataclass(frozen=True)
class ipo(Checked):
    """Identity preference optimisation (arXiv 2310.12036, equation 17): L = (x - 1 / (2 beta))², beta the paper's tau.

    x = (chosen - rejected) - (ref_chosen - ref_rejected). It pulls the margin to a number instead of to infinity. The
    paper and OpenRLHF sum the log-probabilities, TRL averages them over tokens.
    """

    beta: float = within(0.1, 0.0, above=True)

    def __call__(
        self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Return the loss per pair (B,) and the metrics; all four arguments are (B,) log-probabilities."""
        c, r = _log_ratios(chosen, rejected, ref_chosen, ref_rejected)
        return (c - r - 1 / (2 * self.beta)) ** 2, _pair_metrics(self.beta * c, self.beta * r)


@dataclass(frozen=True)
class simpo(Checked):
    """Simple preference optimisation, without a reference policy (arXiv 2405.14734).

    L = -log sigmoid(beta (chosen - rejected) - gamma), on log-probabilities *averaged* over tokens; gamma is the margin
    that is wanted.
    """

    beta: float = within(2.0, 0.0, above=True)
    gamma: float = within(0.5, 0.0)

    def __call__(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss per pair (B,) and the metrics; both arguments are (B,) averaged log-probabilities."""
        c, r = wide_rows(chosen=chosen, rejected=rejected)
        return -logsigmoid(self.beta * (c - r) - self.gamma), _pair_metrics(self.beta * c, self.beta * r)


@dataclass(frozen=True)
class orpo(Checked):
    """Odds ratio preference optimisation, without a reference policy (arXiv 2403.07691).

    L = -chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)), with odds(l) = exp(l) / (1 - exp(l)), on
    log-probabilities *averaged* over tokens; beta is the paper's lambda. The first term is the supervised loss on the
    chosen response, each pair with the same weight (TRL: each token).
    """

    beta: float = within(0.1, 0.0, above=True)

    def __call__(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss per pair (B,) and the metrics; both arguments are (B,) averaged log-probabilities."""
        c, r = wide_rows(chosen=chosen, rejected=rejected)
        loss = -c - self.beta * logsigmoid(_log_odds(c) - _log_odds(r))
        return loss, _pair_metrics(self.beta * c, self.beta * r)


@dataclass(frozen=True)
class kto(Checked):
    """Kahneman-Tversky optimisation: good and bad responses that need not come in pairs (arXiv 2402.01306).

    With l = logprobs - ref_logprobs and z = max(0, kl): L = w_d (1 - sigmoid(beta (l - z))) for a desirable response,
    w_u (1 - sigmoid(beta (z - l))) for an undesirable one.
    """

    beta: float = within(0.1, 0.0, above=True)
    desirable_weight: float = within(1.0, 0.0)
    undesirable_weight: float = within(1.0, 0.0)

    def __call__(
        self, logprobs: Tensor, ref_logprobs: Tensor, desirable: Tensor, kl: Tensor | float
    ) -> tuple[Tensor, Metrics]:
        """Return the loss per response (B,), and its implicit `reward` (B,) as a metric.

        Log-probabilities are (B,), summed; `desirable` (B,) bool; `kl` is `kto_kl` of the whole step, averaged over
        ranks.
        """
        policy, reference = wide_rows(logprobs=logprobs, ref_logprobs=ref_logprobs)
        check_shape("desirable", desirable, tuple(policy.shape))
        if desirable.dtype != torch.bool:
            raise LossError(f"desirable has dtype {desirable.dtype}; wanted bool, True for the good responses.")
        log_ratio = policy - reference.detach()
        point = torch.as_tensor(kl, dtype=log_ratio.dtype, device=log_ratio.device).detach().clamp(min=0)
        if point.dim() != 0:
            raise LossError(f"kl has shape {tuple(point.shape)}; wanted one number for the whole step.")
        good = self.desirable_weight * torch.sigmoid(self.beta * (point - log_ratio))  # 1 - sigmoid(-y)
        bad = self.undesirable_weight * torch.sigmoid(self.beta * (log_ratio - point))
        return torch.where(desirable, good, bad), {"reward": self.beta * log_ratio.detach()}


def kto_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KTO's reference point (arXiv 2402.01306), the mean log-ratio of *mismatched* responses (B,).

    A response is scored here after another example's prompt. The scalar is not clamped: average it over ranks first,
    `kto` then takes max(0, ·) (as TRL does, and as OpenRLHF did while it had KTO).
    """
    policy, reference = wide_rows(logprobs=logprobs, ref_logprobs=ref_logprobs)
    return (policy - reference).mean().detach()


# -- what they share -----------------------------------------------------------------------------------------


def _log_ratios(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p - log p_ref of both responses, (B,) each; the reference without gradient."""
    c, r, ref_c, ref_r = wide_rows(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    return c - ref_c.detach(), r - ref_r.detach()


def _log_odds(logprob: Tensor) -> Tensor:
    """Return log(p / (1 - p)); a probability of 1 is read as 1 - 1e-6, where the odds would be infinite."""
    below_one = logprob.clamp(max=-1e-6)
    return below_one - torch.log(-torch.expm1(below_one))


def _pair_metrics(reward_chosen: Tensor, reward_rejected: Tensor) -> Metrics:
    chosen, rejected = reward_chosen.detach(), reward_rejected.detach()
    return {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": (chosen > rejected).to(chosen.dtype),
    }
