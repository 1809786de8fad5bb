"""Methods of a run by name: each a set of options, over which those that are given count.

| method | advantage | loss |
|---|---|---|
| grpo | group_norm | PPO's, mean over responses; no KL unless `init_kl_coef` says so |
| ppo | gae, with a critic; KL (k1) in the reward; whitened | PPO's |
| dapo | group_norm, groups without signal drawn again, overlong penalty | clipped to 0.8 … 1.28, mean over tokens |
| gspo | group_norm | ratios of whole responses |
| rloo | rloo | PPO's |
| reinforce++ | reinforce++ | PPO's |
| reinforce_baseline | reinforce_baseline | PPO's |
| cpgd | cpgd | CPGD's |

DAPO's overlong penalty begins a fifth of `generate_max_len` before the limit unless `overlong_buffer_len` is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbench.errors import nearest
from rlbench.strategies.config import OPTIONS, OptionError
from rlbench.trainers.reference_flags import ALIASES, NEGATED, REFUSED, asks_for_nothing
from rlbench.trainers.run_options import ALL_OPTIONS, PPO_OPTIONS, RUN_OPTIONS, defaults
from rlbench.trainers.trainer_options import ALIASES as SAMPLING_ALIASES
from rlbench.trainers.trainer_options import SAMPLING

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage_estimator": "group_norm", "init_kl_coef": 0.0},
    "ppo": {"advantage_estimator": "gae", "init_kl_coef": 0.001, "kl_estimator": "k1", "advantages_norm": True},
    "dapo": {
        "advantage_estimator": "group_norm",
        "init_kl_coef": 0.0,
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "loss_agg_mode": "token-mean",
        "dynamic_sampling": True,
        "overlong_buffer": True,
    },
    "gspo": {"advantage_estimator": "group_norm", "init_kl_coef": 0.0, "use_gspo": True},
    "rloo": {"advantage_estimator": "rloo", "init_kl_coef": 0.0},
    "reinforce++": {"advantage_estimator": "reinforce++", "init_kl_coef": 0.0},
    "reinforce_baseline": {"advantage_estimator": "reinforce_baseline", "init_kl_coef": 0.0},
    "cpgd": {"advantage_estimator": "cpgd", "init_kl_coef": 0.0, "use_cpg_loss": True},
}
OVERLONG_SHARE = 5

OF_OTHER_RANKS = {"zero_stage": OPTIONS["zero_stage"].does, "local_rank": "a session's ranks have their devices"}
"""Options that ranks of a session refuse whatever their value is: zero_stage=2, the default, asks for DeepSpeed."""

TRAINER_ARGUMENTS = ("loss_agg_mode", "use_gspo")
"""Options of a run that are arguments of the trainer's class."""


def preset(method: str) -> dict[str, Any]:
    """The options of a method.

    Raises:
        OptionError: there is no such method.
    """
    if method not in METHODS:
        raise OptionError(f"there is no method {method!r}{nearest(method, METHODS)}. Methods: {', '.join(METHODS)}.")
    return dict(METHODS[method])


def with_method(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a method, then those given, which count; by our names already."""
    found = preset(method) | dict(given)
    if method == "dapo" and found["overlong_buffer"] and "overlong_buffer_len" not in given:
        longest = found.get("generate_max_len", defaults()["generate_max_len"])
        found["overlong_buffer_len"] = max(1, int(longest) // OVERLONG_SHARE)
    return found


def method_options(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a trainer of a session is made with: the method's options, then those given.

    Args:
        method: one of `METHODS`.
        given: options of `StrategyConfig`, `PPOConfig`, of the trainer's class and of sampling, by our names or the
            reference's.

    Returns:
        By our names.

    Raises:
        OptionError: an unknown method or name, or one that cannot be honoured; options of a run alone are none of a
            trainer.
    """
    ours = our_names(given, also=(*SAMPLING, *SAMPLING_ALIASES, "do_sample"))
    for name in ours:
        if name in RUN_OPTIONS and name not in TRAINER_ARGUMENTS:
            raise OptionError(f"{name} is an option of `rlbench train`, not of a trainer. Leave it out.")
    return with_method(method, ours)


def our_names(given: Mapping[str, Any], also: tuple[str, ...] = ()) -> dict[str, Any]:
    """Options by our names.

    Args:
        given: by our names or the reference's.
        also: further names to let through as they are.

    Raises:
        OptionError: a name that does not exist (with the nearest), that cannot be honoured (with the reason), or is
            given under two names.
    """
    found: dict[str, Any] = {}
    for written, value in given.items():
        if written in REFUSED:
            if asks_for_nothing(written, value):
                continue
            raise OptionError(f"{written}={value!r} cannot be honoured: {REFUSED[written]}. Leave it out.")
        name = ALIASES.get(written, written)
        if written in NEGATED:
            if not isinstance(value, bool):
                raise OptionError(f"{written}={value!r}: it must be true or false.")
            name, value = NEGATED[written], not value
        if name in OF_OTHER_RANKS:
            raise OptionError(f"{written}={value} cannot be honoured: {OF_OTHER_RANKS[name]}. Leave it out.")
        if name not in ALL_OPTIONS and name not in also:
            known = [*ALL_OPTIONS, *ALIASES, *NEGATED, *also]
            raise OptionError(f"there is no option {written!r}{nearest(str(written), known)}.")
        if name in found:
            raise OptionError(f"{name} is given twice, once as {written}. Give it once.")
        found[name] = value
    return found


def of_trainer(name: str) -> bool:
    """Whether an option is one of the trainer's or the strategy's, not of the run alone."""
    return name in TRAINER_ARGUMENTS or name in PPO_OPTIONS or name not in RUN_OPTIONS
