"""What a trainer's keyword arguments mean: options of the strategy, of the trainer, or of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlbench.errors import nearest
from rlbench.strategies.config import OptionError, StrategyConfig
from rlbench.strategies.config import names as strategy_names
from rlbench.trainers.ppo_config import PPOConfig
from rlbench.trainers.ppo_config import names as trainer_names

ALIASES = {"max_new_tokens": "generate_max_len"}
"""Names that the reference's `generate_kwargs` have for options of ours."""
SAMPLING = {"min_new_tokens": "min_tokens", "min_tokens": "min_tokens", "min_p": "min_p", "stop": "stop",
            "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos", "repetition_penalty": "repetition_penalty",
            "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty"}  # fmt: skip
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
            "temperature": ppo.temperature, "top_p": ppo.top_p, "max_tokens": ppo.generate_max_len,
            **limits, **self.sampling,
        }  # fmt: skip


def read_options(config: StrategyConfig, given: Mapping[str, Any]) -> TrainerOptions:
    """Sort keyword arguments of a trainer; those that the strategy has, too, count for this trainer alone.

    Args:
        config: the strategy's options.
        given: by name.

    Raises:
        OptionError: a name that means nothing, or a value that cannot be honoured.
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
    return TrainerOptions(replace(config, **strategys), PPOConfig(**ours), sampling)
