"""Evaluation: how good the policy is on prompts it is not trained on."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlbench.data import Rollouts
from rlbench.data.rollouts.scoring import score, stopped
from rlbench.dispatch.chain import Step, Steps
from rlbench.engines import InferenceEngine
from rlbench.engines.turns import failed_in_env
from rlbench.errors import DataError, Suggesting
from rlbench.rewards import Board
from rlbench.units import format_number

FAREWELL_S = 1.0
"""How long a stop waits for the reward to end; less than an interrupt waits for its verb."""
POLL_S = 0.05


@dataclass(frozen=True)
class Evaluation(Suggesting):
    """Mean reward over the completions that count, with the scored rollouts behind it.

    Those do not count that the environment's errors ended, that were cut by a stop, or that have no reward.
    """

    reward: float
    rollouts: Rollouts

    def __float__(self) -> float:
        return self.reward

    @property
    def counted(self) -> np.ndarray:
        """(N,) bool: the completions that the mean is over, in `.flat` order."""
        return counted(self.rollouts)

    def __repr__(self) -> str:
        missing = self.left_out()
        said = f"; left out: {missing}" if missing else ""
        reward = format_number(self.reward)
        line = f"Evaluation(reward {reward} over {int(self.counted.sum())} completions{said})"
        return "\n  ".join([line, *self.rollouts.notes])

    def left_out(self) -> str:
        """How many completions do not count, and why; empty where all do."""
        failed = failed_in_env(self.rollouts)
        cut = self.rollouts.aborted & ~failed
        known = int((failed | cut | self.counted).sum())
        reasons = {
            "ended by an error of the environment": int(failed.sum()),
            "cut by a stop": int(cut.sum()),
            "without a reward": self.rollouts.samples - known,
        }
        return ", ".join(f"{number} {why}" for why, number in reasons.items() if number)


def counted(rollouts: Rollouts) -> np.ndarray:
    """(N,) bool: whole completions with a reward."""
    rewards = np.asarray(rollouts.rewards, np.float64)
    return np.isfinite(rewards) & ~rollouts.aborted & ~failed_in_env(rollouts)


def evaluate_steps(
    inference: InferenceEngine,
    prompts: Any,
    reward: Any,
    n: int,
    sampling: dict[str, Any],
    progress: bool,
    env: Any = None,
) -> Steps:
    """Generate and score; does not touch the session's rollout counter, so evaluating changes no later sample.

    Without `reward` the environment's rewards count. See `Evaluation` for which completions do not count.

    Raises:
        DataError: neither a reward nor an environment that gives one, several greedy completions of a prompt, which
            would be one and the same, or no completion that counts.
        Stopped: `.partial` holds Rollouts: those drawn when it was stopped while it drew, those that have a reward when
            it was stopped while it scored (None without any).
    """
    if reward is None and env is None:
        raise DataError("evaluate needs a reward function, or an environment (env=…) that gives rewards")
    if n > 1 and sampling.get("temperature") == 0:
        raise DataError(
            f"evaluate(n={n}, temperature=0) would draw the same greedy completion {n} times: n=1, or a temperature "
            "above 0"
        )
    rollouts = yield inference.submit_generate(prompts, sampling, n=n, progress=progress, number=0, env=env)
    scored = (yield from _scored(rollouts, reward)) if reward is not None else rollouts
    if scored.rewards is None:
        raise DataError("the environment gave no reward: give evaluate a reward function")
    rows = counted(scored)
    if not rows.any():
        raise DataError(f"no completion counts: {Evaluation(float('nan'), scored).left_out()}")
    return Evaluation(float(np.mean(scored.rewards[rows])), scored)


def _scored(rollouts: Rollouts, reward: Any) -> Generator[Step, Any, Rollouts]:
    scored: Rollouts = yield Scoring(rollouts, reward)
    return scored


class Scoring:
    """A step of a verb that scores rollouts, in a thread of its own so that a stop is felt at once.

    A stop ends what can be ended: coroutines, processes of `isolate=True`, requests; a plain function after the
    completion it is at. One that hangs there cannot be cut, as it runs in this process: it is left behind.
    """

    def __init__(self, rollouts: Rollouts, reward: Any) -> None:
        self._rollouts, self._reward, self._board = rollouts, reward, Board()
        self._asked: float | None = None
        self._value: Rollouts | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="rlbench scoring", daemon=True).start()

    def stop(self) -> None:
        """Ask it to stop; returns at once."""
        self._asked = self._asked or time.monotonic()
        self._board.stop()

    def result(self, timeout: float | None = None) -> Rollouts:
        """Wait and return the scored rollouts; raises what scoring raised, TimeoutError after `timeout` seconds.

        Raises:
            Stopped: `.partial` holds the completions that have a reward, None where none has.
        """
        began = time.monotonic()
        while not self._ended.wait(POLL_S):
            if self._asked is not None and time.monotonic() - self._asked > FAREWELL_S:
                raise stopped(
                    self._rollouts,
                    self._board,
                    "; the reward goes on with the completion it is at, in a thread that cannot be cut: "
                    "rb.rewards.function(fn, isolate=True) can be",
                )
            if timeout is not None and time.monotonic() - began > timeout:
                raise TimeoutError(f"scoring is still running after {timeout:g} s")
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value

    def _run(self) -> None:
        try:
            self._value = score(self._rollouts, self._reward, board=self._board)
        except BaseException as error:  # for whoever waits for it, also a KeyboardInterrupt of the function's own
            self._error = error
        finally:
            self._ended.set()
