"""Which policy loss, and which aggregation, a trainer's options mean. What contradicts itself raises."""

from __future__ import annotations

from typing import Any

from rlbench.errors import LossError, nearest
from rlbench.options import OptionError, defaults
from rlbench.rl import (
    Aggregation,
    MismatchCorrection,
    PolicyLoss,
    TokenFilter,
    cpgd,
    gspo,
    high_entropy,
    icepop,
    ppo,
    sequence_tis,
    token_tis,
)
from rlbench.rl.aggregate import MODES
from rlbench.strategies.options.config import StrategyConfig
from rlbench.trainers.options.ppo_config import PPOConfig

MISMATCH: dict[str, type[MismatchCorrection]] = {
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
    "icepop": icepop,
}


def loss_of(options: StrategyConfig, config: PPOConfig) -> tuple[PolicyLoss, Aggregation]:
    """Return the policy loss that the options mean, and how its tokens become one number.

    PPO's clipped loss (bounds `clip_low`, `clip_high`), or with `use_cpg_loss` CPGD's, or with `use_gspo` GSPO's.
    A `clip_low` at its default stands for GSPO's own bounds there (3e-4 and 4e-4): a mean over a response varies far
    less than the ratio of a token, and 0.2 would never clip it.

    Args:
        options: `use_kl_loss`, `kl_estimator`.
        config: `clip_low`, `use_cpg_loss`, `kl_coef` (the weight of the KL in the loss, with `use_kl_loss`),
            `entropy_coef`, `high_entropy_token_ratio` (of the tokens of a whole optimizer step, arXiv 2506.01939),
            `old_logprobs` ("sampler": the ratio is taken against the sampler's), `mismatch`.

    Raises:
        OptionError: an unknown mode or correction, or options that contradict each other or could not act.
    """
    mode = config.aggregation
    if mode not in MODES:
        raise OptionError(f"aggregation={mode!r}{nearest(mode, MODES)}; it is one of {', '.join(MODES)}.")
    if config.use_gspo:
        _check_gspo(config)
    kind: Any = gspo if config.use_gspo else cpgd if config.use_cpg_loss else ppo
    try:
        loss = kind(
            **_bounds(config),
            **_kl(options, config),
            entropy_coef=config.entropy_coef,
            anchor="sampler" if config.old_logprobs == "sampler" else "old",
            mismatch=_mismatch(config),
            tokens=_tokens(config),
            aggregation=mode,
        )
    except LossError as error:
        raise OptionError(f"the options make no loss: {error}") from error
    return loss, Aggregation(mode)


def _check_gspo(config: PPOConfig) -> None:
    if config.use_cpg_loss:
        raise OptionError("use_gspo and use_cpg_loss name two losses. Choose one.")
    if (mode := config.aggregation) != "seq-mean-token-mean":
        raise OptionError(
            f"use_gspo with aggregation={mode!r}: a ratio that belongs to a response is averaged over responses "
            "whatever their length; use 'seq-mean-token-mean'."
        )
    if 0 < config.high_entropy_token_ratio < 1:
        raise OptionError(
            f"use_gspo with high_entropy_token_ratio={config.high_entropy_token_ratio:g}: GSPO's ratio is one number "
            "for all tokens of a response, of which a choice of tokens would leave a part. Use one of the two."
        )


def _bounds(config: PPOConfig) -> dict[str, float]:
    given = {} if config.clip_high is None else {"clip_high": config.clip_high}
    if config.use_gspo and config.clip_low == defaults(PPOConfig)["clip_low"]:
        return given
    return {"clip_low": config.clip_low, "clip_high": config.clip_low} | given


def _kl(options: StrategyConfig, config: PPOConfig) -> dict[str, Any]:
    if not options.use_kl_loss:
        return {}
    if config.kl_coef == 0:
        raise OptionError("use_kl_loss would have no effect with kl_coef=0: give a weight above 0.")
    if options.kl_estimator == "k1":
        raise OptionError(
            "use_kl_loss with kl_estimator='k1': the gradient of that estimate is 0 on average, so it would only add "
            "noise; use 'k2' (the gradient of the KL) or 'k3'."
        )
    return {"kl_coef": config.kl_coef, "kl_estimator": options.kl_estimator}


def _tokens(config: PPOConfig) -> TokenFilter | None:
    ratio = config.high_entropy_token_ratio
    return high_entropy(fraction=ratio) if 0 < ratio < 1 else None


def _mismatch(config: PPOConfig) -> MismatchCorrection | None:
    if config.mismatch is None:
        return None
    if config.mismatch not in MISMATCH:
        raise OptionError(
            f"mismatch={config.mismatch!r}{nearest(config.mismatch, MISMATCH)}; it is None or one of "
            f"{', '.join(MISMATCH)}."
        )
    if config.old_logprobs == "sampler":
        raise OptionError(
            f"old_logprobs='sampler' with mismatch={config.mismatch!r}: the ratio is taken against the sampler "
            "already, so there is nothing left to correct. Use old_logprobs='recompute' with it, or no mismatch."
        )
    return MISMATCH[config.mismatch]()
