"""What a trainer's keyword arguments mean: options of the strategy, of the trainer, or of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlbench.options import OptionError, canonical, effectless, options_in
from rlbench.strategies.options.config import PER_TRAINER, StrategyConfig
from rlbench.trainers.options.ppo_config import PPOConfig

SAMPLING = {
    "min_new_tokens": "min_tokens",
    "min_tokens": "min_tokens",
    "min_p": "min_p",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Further options of sampling, and what the engine calls them."""
NOT_OF_TRAINERS = (*SAMPLING, "do_sample")


@dataclass(frozen=True)
class TrainerOptions:
    """`strategy`: the options of `StrategyConfig`; `ppo`: of the trainer; `sampling`: further ones of the engine.

    `given`: those that the trainer was given, by our names.
    """

    strategy: StrategyConfig
    ppo: PPOConfig
    sampling: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """What the experience maker is given to sample with."""
        ppo = self.ppo
        limits = {} if ppo.top_k == -1 else {"top_k": ppo.top_k}
        return {
            "temperature": ppo.temperature,
            "top_p": ppo.top_p,
            "max_tokens": ppo.max_tokens,
            **limits,
            **self.sampling,
        }


def read_options(config: StrategyConfig, given: Mapping[str, Any], critic: bool = False) -> TrainerOptions:
    """Sort keyword arguments of a trainer; those that the strategy has, too, count for this trainer alone.

    Args:
        config: the strategy's options.
        given: by name or alias.
        critic: whether the trainer has one, which says what estimator is meant where none is named.

    Raises:
        OptionError: a name that means nothing, a value that cannot be honoured, or one that the strategy should have
            been made with.
    """
    named = canonical(given, StrategyConfig, PPOConfig, also=NOT_OF_TRAINERS)
    if not named.pop("do_sample", True):
        raise OptionError("do_sample=False cannot be honoured: experience is sampled. Lower the temperature.")
    sampling = {SAMPLING[name]: value for name, value in named.items() if name in SAMPLING}
    ppo = PPOConfig(**{name: value for name, value in named.items() if name in options_in(PPOConfig)})
    own = {name: value for name, value in named.items() if name in options_in(StrategyConfig)}
    return TrainerOptions(with_estimator(_with_own(config, own), critic), ppo, sampling, named)


def doubts(options: TrainerOptions, critic: bool, ema: bool) -> list[str]:
    """Say which options a trainer was given that have no effect, or hardly the one that is meant.

    Args:
        options: all of them.
        critic, ema: whether the trainer has a critic, and a moving average.
    """
    present = {"critic_pretrain": critic, "enable_ema": ema}

    def value(name: str) -> Any:
        held = options.ppo if name in options_in(PPOConfig) else options.strategy
        return present[name] if name in present else getattr(held, name)

    texts = effectless(options.given, value, PPOConfig, StrategyConfig)
    estimator, kl, in_loss = (value(name) for name in ("advantage_estimator", "kl_estimator", "use_kl_loss"))
    if not in_loss and options.ppo.kl_coef > 0 and kl != "k1" and {"kl_estimator", "kl_coef"} & set(options.given):
        texts.append(f"kl_estimator={kl} in the reward: the sum of k1 is the KL of a response; take that")
    if in_loss and estimator in ("gae", "cpgd"):
        texts.append(f"use_kl_loss with advantage_estimator={estimator}, which has the KL in the reward")
    return texts


def with_estimator(options: StrategyConfig, critic: bool) -> StrategyConfig:
    """Return the options with the estimator that is meant where none is named: GAE with a critic, else group_norm."""
    if options.advantage_estimator is not None:
        return options
    return replace(options, advantage_estimator="gae" if critic else "group_norm")


def _with_own(config: StrategyConfig, own: Mapping[str, Any]) -> StrategyConfig:
    """Return the strategy's options with those of a trainer.

    Raises:
        OptionError: one that acts in the strategy alone, and is another there.
    """
    made = replace(config, **own)
    for name in own:
        here, there = getattr(made, name), getattr(config, name)
        if options_in(StrategyConfig)[name].section not in PER_TRAINER and here != there:
            raise OptionError(
                f"{name}={here!r} cannot be honoured by a trainer: it acts in the strategy, which was made with "
                f"{there!r}. Give it where the strategy is made, or leave it out."
            )
    return made
