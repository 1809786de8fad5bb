"""Rollouts with an environment, seen from the driver: its options, and what its code raised on the replicas."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from rlbench.data import Rollouts
from rlbench.data.rollouts.jobs import EnvJob
from rlbench.dispatch import by_value
from rlbench.envs.protocol import check_env
from rlbench.envs.thoughts import THOUGHTS
from rlbench.errors import DataError
from rlbench.traces import remember

TURN_OPTIONS = {"max_turns": 8, "max_total_tokens": None, "env_timeout_s": 60.0, "thoughts": "keep"}
"""With their defaults: most turns of a sample; most response tokens of a sample, sampled and observed together (None:
what the model's length holds); seconds one `reset` or `step` may take (None: for ever); whether later turns see what
the policy thought in earlier ones ("keep") or not ("strip": `rlbench.envs.thoughts`)."""


def split_options(env: Any, sampling: dict[str, Any]) -> tuple[EnvJob | None, dict[str, Any]]:
    """Return the environment on its way to the replicas, and the sampling options alone."""
    own = {name: sampling[name] for name in TURN_OPTIONS if name in sampling}
    rest = {name: value for name, value in sampling.items() if name not in own}
    if env is None:
        if own:
            raise DataError(f"{', '.join(own)} would have no effect: turns need an environment, env=…")
        return None, rest
    check_env(env)
    options: dict[str, Any] = TURN_OPTIONS | own
    if (thoughts := options.pop("thoughts")) not in THOUGHTS:
        raise DataError(f"thoughts={thoughts!r:.40}: wanted {' or '.join(map(repr, THOUGHTS))}")
    for name, value in options.items():
        kind = int | float if name == "env_timeout_s" else int
        wrong = not isinstance(value, kind) or isinstance(value, bool) or not value > 0
        if wrong and (value is not None or name == "max_turns"):
            raise DataError(f"{name}={value!r}: wanted a number above 0")
    blob = by_value.dumps(env, "env", "the replicas", DataError)
    return EnvJob(blob, options["max_turns"], options["max_total_tokens"], options["env_timeout_s"], thoughts), rest


def failed_in_env(rollouts: Rollouts) -> np.ndarray:
    """Return (N,) bool: ended by an error in the environment."""
    failed = np.zeros(rollouts.samples, bool)
    failed[[error.sample for error in rollouts.env_errors if error.ended]] = True
    return failed


def tell_env_errors(rollouts: Rollouts) -> None:
    """Say in one line what the environment's code raised; where it ended every sample, raise that with the user's line
    of the first."""
    errors = rollouts.env_errors
    if not errors:
        return
    ended = [error for error in errors if error.ended]
    if rollouts.samples and len({error.sample for error in ended}) == rollouts.samples:
        first = ended[0]
        failure = DataError(f"the environment failed for all {rollouts.samples} completions: {first}")
        failure.user_line, failure.full_traceback = first.line, remember(first.traceback)
        raise failure
    remember((ended or errors)[0].traceback)
    counts = [f"{len(ended)} of {rollouts.samples} completions were ended by the environment's errors"] if ended else []
    if rest := len(errors) - len(ended):
        counts.append(f"{rest} errors in tools or close() ended none")
    warnings.warn(f"{'; '.join(counts)}: rollouts.env_errors. First: {(ended or errors)[0]}", UserWarning, stacklevel=2)
