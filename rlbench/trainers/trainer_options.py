"""What a trainer's keyword arguments mean: options of the strategy, of the trainer, or of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlbench.errors import nearest
from rlbench.strategies.config import OPTIONS, TRAINER, OptionError, StrategyConfig
from rlbench.strategies.config import names as strategy_names
from rlbench.trainers.ppo_config import PPOConfig
from rlbench.trainers.ppo_config import names as trainer_names

ALIASES = {"max_new_tokens": "generate_max_len"}
"""Names that the reference's `generate_kwargs` have for options of ours."""
OF_STEPS = ("max_norm", "micro_train_batch_size", "train_batch_size")
"""Options of the strategy that a trainer may have otherwise; all others of the strategy acted when that was made."""
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
"""Further arguments of `generate_kwargs`, and what the engine calls them."""


@dataclass(frozen=True)
class TrainerOptions:
    """`strategy`: the options of `StrategyConfig`; `ppo`: of the trainer; `sampling`: further ones of the engine."""

    strategy: StrategyConfig
    ppo: PPOConfig
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """What the experience maker is given to sample with."""
        ppo = self.ppo
        limits = {} if ppo.top_k == -1 else {"top_k": ppo.top_k}
        return {
            "temperature": ppo.temperature,
            "top_p": ppo.top_p,
            "max_tokens": ppo.generate_max_len,
            **limits,
            **self.sampling,
        }


def read_options(config: StrategyConfig, given: Mapping[str, Any], critic: bool = False) -> TrainerOptions:
    """Sort keyword arguments of a trainer; those that the strategy has, too, count for this trainer alone.

    Args:
        config: the strategy's options.
        given: by name.
        critic: whether the trainer has one, which says what estimator is meant where none is named.

    Raises:
        OptionError: a name that means nothing, a value that cannot be honoured, or one that the strategy should have
            been made with.
    """
    ours: dict[str, Any] = {}
    strategys: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for written, value in given.items():
        name = ALIASES.get(written, written)
        if name in trainer_names():
            ours[name] = value
        elif name in strategy_names():
            strategys[name] = value
        elif name in SAMPLING:
            sampling[SAMPLING[name]] = value
        elif name == "do_sample":
            if not value:
                raise OptionError("do_sample=False cannot be honoured: experience is sampled. Lower the temperature.")
        else:
            known = [*trainer_names(), *strategy_names(), *SAMPLING, *ALIASES]
            raise OptionError(f"the trainer has no option {written!r}{nearest(written, known)}.")
    return TrainerOptions(with_estimator(_with_own(config, strategys), critic), PPOConfig(**ours), sampling)


def with_estimator(options: StrategyConfig, critic: bool) -> StrategyConfig:
    """The options with the estimator that is meant where none is named: GAE with a critic, else group_norm."""
    if options.advantage_estimator is not None:
        return options
    return replace(options, advantage_estimator="gae" if critic else "group_norm")


def _with_own(config: StrategyConfig, own: Mapping[str, Any]) -> StrategyConfig:
    """The strategy's options with those of a trainer.

    Raises:
        OptionError: one that acts in the strategy alone, and is another there.
    """
    made = replace(config, **own)
    for name in own:
        here, there = getattr(made, name), getattr(config, name)
        if OPTIONS[name].by != TRAINER and name not in OF_STEPS and here != there:
            raise OptionError(
                f"{name}={here!r} cannot be honoured by a trainer: it acts in the strategy, which was made with "
                f"{there!r}. Give it where the strategy is made, or leave it out."
            )
    return made
