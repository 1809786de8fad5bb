"""What a trainer's keyword arguments mean: options of the strategy, of the trainer, or of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlbench.options import OptionError, canonical, effectless, options_in, refuse
from rlbench.strategies.options.config import PER_TRAINER, StrategyConfig
from rlbench.trainers.options.loop_options import LoopOptions
from rlbench.trainers.options.ppo_config import PPOConfig

OF_ENGINES = "min_tokens min_p stop stop_token_ids ignore_eos repetition_penalty presence_penalty frequency_penalty"
SAMPLING = {"min_new_tokens": "min_tokens"} | {name: name for name in OF_ENGINES.split()}
"""Further options of sampling, and what the engine calls them."""
NOT_OF_TRAINERS = (*SAMPLING, "do_sample")
COMPARING = ("rloo", "reinforce_baseline", "group_norm", "grpo", "cpgd")
"""Estimators that compare the samples of a prompt."""
UNDISCOUNTED = ("reinforce_baseline", "cpgd")


@dataclass(frozen=True)
class TrainerOptions:
    """Options of the strategy, the trainer and the engine; `given`: those that were set, by our names."""

    strategy: StrategyConfig
    ppo: PPOConfig
    sampling: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loop(self) -> LoopOptions:
        """Those that all trainers have."""
        return self.ppo

    def told(self) -> dict[str, Any]:
        """Return all options of the trainer, and of the strategy's those that are not at their defaults."""
        return {**vars(self.ppo), **{name: self.strategy[name] for name in self.strategy.overridden()}}


def read_options(config: StrategyConfig, given: Mapping[str, Any], critic: bool = False) -> TrainerOptions:
    """Sort keyword arguments of a trainer, by name or alias; those that the strategy has, too, count for it alone."""
    named = canonical(given, StrategyConfig, PPOConfig, also=NOT_OF_TRAINERS)
    if not named.pop("do_sample", True):
        raise OptionError("do_sample=False cannot be honoured: experience is sampled. Lower the temperature.")
    sampling = {SAMPLING[name]: value for name, value in named.items() if name in SAMPLING}
    ppo = PPOConfig(**{name: value for name, value in named.items() if name in options_in(PPOConfig)})
    own = {name: value for name, value in named.items() if name in options_in(StrategyConfig)}
    return TrainerOptions(with_estimator(_with_own(config, own), critic), ppo, sampling, named)


def check_together(options: StrategyConfig, config: PPOConfig, critic: bool) -> None:
    """Refuse options that contradict each other or could not act together; `options` name their estimator."""
    name, last, most = options.advantage_estimator, options.overlong_buffer_len, config.max_tokens
    centred, kl_loss = options.reward_running_norm_minus_mean, options.use_kl_loss
    compares = "dynamic_sampling" if options.dynamic_sampling else name if name in COMPARING else None
    refuse(
        (name == "gae" and not critic, "advantage_estimator='gae' needs a critic; give one, or take 'group_norm'"),
        (name != "gae" and critic, f"a critic has no effect with advantage_estimator={name!r}: critic=None, or 'gae'"),
        (compares and options.n < 2, f"n={options.n}: {compares} compares samples of a prompt, n is 2 or more"),
        (name in UNDISCOUNTED and config.gamma != 1, f"gamma has no effect: {name} knows no discount"),
        (kl_loss and options.kl_estimator == "k1", "use_kl_loss with kl_estimator='k1' would only add noise: k2 or k3"),
        (kl_loss and not config.kl_coef, "use_kl_loss has no effect with kl_coef=0: give a weight above 0"),
        (
            centred and not options.reward_running_norm,
            "reward_running_norm_minus_mean has no effect without reward_running_norm: set both",
        ),
        (
            options.overlong_buffer and not 1 <= last <= most,
            f"overlong_buffer_len={last}: it is from 1 to max_tokens={most}",
        ),
    )


def doubts(options: StrategyConfig, ppo: PPOConfig, given: Mapping[str, Any], critic: bool, ema: bool) -> list[str]:
    """Say which of the given options have no effect, or hardly the one that is meant.

    `critic`, `ema`: whether the trainer has a critic, and a moving average.
    """
    present = {"critic_pretrain": critic, "enable_ema": ema}

    def value(name: str) -> Any:
        return present[name] if name in present else getattr(ppo if name in options_in(PPOConfig) else options, name)

    texts = effectless(given, value, PPOConfig, StrategyConfig)
    estimator, kl, in_loss = (value(name) for name in ("advantage_estimator", "kl_estimator", "use_kl_loss"))
    if not in_loss and ppo.kl_coef > 0 and kl != "k1" and {"kl_estimator", "kl_coef"} & set(given):
        texts.append(f"kl_estimator={kl} in the reward: the sum of k1 is the KL of a response; take that")
    if in_loss and estimator in ("gae", "cpgd"):
        texts.append(f"use_kl_loss with advantage_estimator={estimator}, which has the KL in the reward")
    return texts


def with_estimator(options: StrategyConfig, critic: bool) -> StrategyConfig:
    """Name the estimator that is meant where none is: GAE with a critic, else group_norm."""
    if options.advantage_estimator is not None:
        return options
    return replace(options, advantage_estimator="gae" if critic else "group_norm")


def _with_own(config: StrategyConfig, own: Mapping[str, Any]) -> StrategyConfig:
    """Return the strategy's options with a trainer's; refuse another value where one acts in the strategy alone."""
    made = replace(config, **own)
    for name in own:
        here, there = getattr(made, name), getattr(config, name)
        if options_in(StrategyConfig)[name].section not in PER_TRAINER and here != there:
            said = f"{name}={here!r} cannot be honoured by a trainer: it acts in the strategy"
            raise OptionError(f"{said}, which was made with {there!r}. Give it there, or leave it out.")
    return made
