"""Which policy loss, and which aggregation, a trainer's options mean."""

from __future__ import annotations

from typing import Any

from rlbench import rl
from rlbench.errors import LossError
from rlbench.options import OptionError, defaults
from rlbench.strategies.options.config import StrategyConfig
from rlbench.trainers.options.ppo_config import AGGREGATION, PPOConfig

MISMATCH: dict[str, type[rl.MismatchCorrection]] = {
    kind.__name__: kind for kind in (rl.token_tis, rl.sequence_tis, rl.icepop)
}


def loss_of(options: StrategyConfig, config: PPOConfig) -> tuple[rl.PolicyLoss, rl.Aggregation]:
    """Return the policy loss that the options mean, and how its tokens become one number.

    PPO's clipped loss, or with `use_cpg_loss` CPGD's, or with `use_gspo` GSPO's. A `clip_low` at its default stands for
    GSPO's own bounds there: a mean over a response varies far less than the ratio of a token.
    """
    kind: Any = rl.gspo if config.use_gspo else rl.cpgd if config.use_cpg_loss else rl.ppo
    bounds: dict[str, float] = {}
    if not config.use_gspo or config.clip_low != defaults(PPOConfig)["clip_low"]:
        bounds = {"clip_low": config.clip_low, "clip_high": config.clip_low}
    if config.clip_high is not None:
        bounds["clip_high"] = config.clip_high
    in_loss = {"kl_coef": config.kl_coef, "kl_estimator": options.kl_estimator} if options.use_kl_loss else {}
    share = config.high_entropy_token_ratio  # of the tokens of a whole optimizer step, arXiv 2506.01939
    try:
        loss = kind(
            **bounds,
            **in_loss,
            entropy_coef=config.entropy_coef,
            anchor="sampler" if config.old_logprobs == "sampler" else "old",
            mismatch=None if config.mismatch is None else MISMATCH[config.mismatch](),
            tokens=rl.high_entropy(fraction=share) if 0 < share < 1 else None,
            aggregation=config.aggregation or AGGREGATION,
        )
        aggregation = rl.Aggregation.of_loss(loss)
    except LossError as error:
        raise OptionError(f"the options make no loss: {error}") from error
    return loss, aggregation
