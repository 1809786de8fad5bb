"""Methods of a run by name: each a set of options, over which those that are given count.

| method | advantage | loss |
|---|---|---|
| grpo | group_norm | PPO's, mean over responses; no KL unless `kl_coef` says so |
| ppo | gae, with a critic; KL (k1) in the reward; whitened | PPO's |
| dapo | group_norm, groups without signal drawn again, overlong penalty | clipped to 0.8 … 1.28, mean over tokens |
| gspo | group_norm | ratios of whole responses |
| rloo | rloo | PPO's |
| reinforce++ | reinforce++ | PPO's |
| reinforce_baseline | reinforce_baseline | PPO's |
| cpgd | cpgd | CPGD's |

DAPO's overlong penalty begins a fifth of `max_tokens` before the limit unless `overlong_buffer_len` is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from rlbench.errors import nearest
from rlbench.options import OptionError, canonical, defaults, options_in
from rlbench.strategies.options.config import StrategyConfig
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.run_options import RunOptions
from rlbench.trainers.options.trainer_options import NOT_OF_TRAINERS, TrainerOptions, doubts

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage_estimator": "group_norm", "kl_coef": 0.0},
    "ppo": {"advantage_estimator": "gae", "kl_coef": 0.001, "kl_estimator": "k1", "advantages_norm": True},
    "dapo": {
        "advantage_estimator": "group_norm",
        "kl_coef": 0.0,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token-mean",
        "dynamic_sampling": True,
        "overlong_buffer": True,
    },
    "gspo": {"advantage_estimator": "group_norm", "kl_coef": 0.0, "use_gspo": True},
    "rloo": {"advantage_estimator": "rloo", "kl_coef": 0.0},
    "reinforce++": {"advantage_estimator": "reinforce++", "kl_coef": 0.0},
    "reinforce_baseline": {"advantage_estimator": "reinforce_baseline", "kl_coef": 0.0},
    "cpgd": {"advantage_estimator": "cpgd", "kl_coef": 0.0, "use_cpg_loss": True},
}
OVERLONG_SHARE = 5
OF_OTHER_RANKS = ("zero_stage", "local_rank")
"""Options that ranks of a session refuse whatever their value is: zero_stage=2, the default, asks for DeepSpeed."""


def preset(method: str) -> dict[str, Any]:
    """Return the options of a method.

    Raises:
        OptionError: there is no such method.
    """
    if method not in METHODS:
        raise OptionError(f"there is no method {method!r}{nearest(method, METHODS)}. Methods: {', '.join(METHODS)}.")
    return dict(METHODS[method])


def with_method(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a method, then those given, which count; by our names already."""
    chosen = preset(method) | dict(given)
    if method == "dapo" and chosen["overlong_buffer"] and "overlong_buffer_len" not in given:
        longest = chosen.get("max_tokens", defaults(PPOConfig)["max_tokens"])
        chosen["overlong_buffer_len"] = max(1, int(longest) // OVERLONG_SHARE)
    return chosen


def method_options(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a trainer of a session is made with: the method's options, then those given.

    Args:
        method: one of `METHODS`.
        given: options of `StrategyConfig`, `PPOConfig` and of sampling, by name or alias.

    Raises:
        OptionError: an unknown method or name, or one that cannot be honoured; options of a run alone are none of a
            trainer.
    """
    ours = our_names(given, also=NOT_OF_TRAINERS)
    for name in ours:
        if name in options_in(RunOptions):
            raise OptionError(f"{name} is an option of `rlbench train`, not of a trainer. Leave it out.")
    return with_method(method, ours)


def our_names(given: Mapping[str, Any], also: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return options of a run by our names; see `canonical`.

    Raises:
        OptionError: also one that acts on ranks that are not a session's.
    """
    for name in OF_OTHER_RANKS:
        if given.get(name) is not None:
            raise OptionError(
                f"{name}={given[name]} cannot be honoured: a session's ranks are made by it. Leave it out."
            )
    return canonical(given, RunOptions, PPOConfig, StrategyConfig, also=also)


def warn_of(chosen: Mapping[str, Any], critic: bool, ema: bool) -> None:
    """Warn in the kernel of a trainer's options that have no effect; the ranks' own warnings are in their logs."""
    ppo = PPOConfig(**{name: value for name, value in chosen.items() if name in options_in(PPOConfig)})
    own = {name: value for name, value in chosen.items() if name in options_in(StrategyConfig)}
    for text in doubts(TrainerOptions(StrategyConfig(**own), ppo, given=chosen), critic, ema):
        warnings.warn(text, stacklevel=4)
