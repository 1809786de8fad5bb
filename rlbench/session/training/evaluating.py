"""`session.evaluate`: several sets of prompts in one call of the replicas, each scored, each put on record."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, overload

import numpy as np

from rlbench.data import PromptSet, Rollouts, load
from rlbench.data.forking import Named, name_of
from rlbench.data.prompts.sources import READERS
from rlbench.data.record.origin import made_with
from rlbench.data.rollouts.scoring import score, stopped
from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.errors import DataError, nearest
from rlbench.rewards import Board
from rlbench.session.core import SessionCore
from rlbench.session.record.evaluations import EvaluationLog
from rlbench.session.training.evaluation import Evaluation, Evaluations
from rlbench.session.verb import PendingVerb

FAREWELL_S = 1.0
"""How long a stop waits for the reward to end; less than an interrupt waits for its verb."""
POLL_S = 0.05
ROW = ("prompt", "prompt_token_ids")
"""Keys by which a mapping is one row, and not sets of prompts by name."""


class Evaluate(Protocol):
    """The type of the verb: sets by name give `Evaluations`, one set an `Evaluation`."""

    @overload
    def __call__(
        self,
        prompts: Mapping[str, Any],
        reward: Any = None,
        n: int = 1,
        *,
        block: Literal[True] = True,
        **options: Any,
    ) -> Evaluations: ...
    @overload
    def __call__(
        self, prompts: Any, reward: Any = None, n: int = 1, *, block: Literal[True] = True, **options: Any
    ) -> Evaluation: ...
    @overload
    def __call__(
        self, prompts: Any, reward: Any = None, n: int = 1, *, block: Literal[False], **options: Any
    ) -> PendingVerb[Any]: ...


def evaluate(
    core: SessionCore,
    prompts: Any,
    reward: Any = None,
    n: int = 1,
    *,
    progress: bool = True,
    env: Any = None,
    adapter: Named | str | None = None,
    **sampling: Any,
) -> Generator[ChainStep, Any, Evaluation | Evaluations]:
    """Mean reward of `n` completions per prompt; returns an `Evaluation`. One is greedy and several are sampled at
    temperature 1, unless told otherwise. No later sample of the session changes.

        session.evaluate({"train": prompts, "gsm8k": "gsm8k_test.jsonl"}, rb.rewards.math(), n=8, max_tokens=256)

    With `env`, `adapter`, `template` and `tools` as in `rollout`; where `reward` is None the environment's rewards
    count. Completions that the environment's errors ended, or a stop cut, do not count; the `Evaluation` says how many.
    `session.evaluations` keeps what was found with the version of the weights; the history and trackers get it as
    `eval/<set>/reward`.

    Args:
        prompts: what `rollout` takes, or a file (`.jsonl`, `.parquet`, `.json`, `.csv`) as `rb.data.load` reads it; or
            several sets of them by name, of which all completions are drawn in one call: returns `Evaluations`. A set
            draws the same completions alone and beside others.
        reward: what `rollouts.score` takes; or one for each set, by the same names.

    A stop raises `Stopped`; its `.partial` are Rollouts: what was drawn, or those that had a reward by then.
    """
    sets, adapter = named_sets(prompts), name_of(adapter)
    rewards = by_set(reward, env, sets)
    chosen = {"temperature": 0.0 if n == 1 else 1.0} | sampling
    if n > 1 and chosen["temperature"] == 0:
        raise DataError(f"evaluate(n={n}, temperature=0) would draw one greedy completion {n} times: n=1, or sample")
    drawn = yield core.inference.submit_generate(
        [prompt for one in sets.values() for prompt in one],
        chosen,
        n=n,
        progress=progress,
        number=0,
        env=env,
        seeds=np.concatenate([core.inference.seeds(chosen, 0, len(one), n) for one in sets.values()]),
        under=adapter,
    )
    scored = yield from _scored(drawn, sets, rewards)
    other = None if adapter is None or adapter == core.link.state("branch")["branch"] else adapter
    found = {name: evaluation_of(rollouts, name, other) for name, rollouts in scored.items()}
    core.evaluations.note(list(found.values()), adapter=other)
    return Evaluations(found) if _are_sets(prompts) else next(iter(found.values()))


def named_sets(prompts: Any) -> dict[str, PromptSet]:
    """Return the sets of prompts by name; one that was given without a name has that of its source, or ""."""
    if not _are_sets(prompts):
        one = _as_set(prompts)
        return {one.name: one}
    if not prompts:
        raise DataError('evaluate got no set of prompts: {"test": prompts}')
    sets = {}
    for name, given in prompts.items():
        if not isinstance(name, str) or not name:
            raise DataError(f"evaluate: a set of prompts is named {name!r}: wanted a text")
        sets[name] = _as_set(given, name)
        if not len(sets[name]):
            raise DataError(f"evaluate: the set {name!r} has no prompts")
    return sets


def by_set(reward: Any, env: Any, sets: Mapping[str, PromptSet]) -> Any:
    """Return the reward, or those of each set by name; refuse what leaves a set without one."""
    if not isinstance(reward, Mapping):
        if reward is None and env is None:
            raise DataError("evaluate needs a reward function, or an environment (env=…) that gives rewards")
        return reward
    if "" in sets:
        raise DataError(f"evaluate: rewards by name ({', '.join(map(str, reward))}) need prompts by the same names")
    for name in (*sets, *reward):
        if name not in sets or name not in reward:
            other, what = (sets, "prompts") if name not in sets else (reward, "reward")
            raise DataError(f"evaluate: no {what} for the set {name!r}{nearest(name, other)}: give both the same names")
    return reward


def _are_sets(prompts: Any) -> bool:
    return isinstance(prompts, Mapping) and not any(key in prompts for key in ROW)


def _as_set(prompts: Any, name: str = "") -> PromptSet:
    if isinstance(prompts, Path) or (isinstance(prompts, str) and Path(prompts).suffix in READERS):
        return load(prompts, name=name or None)
    return PromptSet.of(prompts, name)


def _scored(drawn: Rollouts, sets: Mapping[str, PromptSet], reward: Any) -> Steps:
    """Score what was drawn, all at once where one reward is for all; returns the rollouts of each set by name."""
    if reward is not None and not isinstance(reward, Mapping):
        drawn = yield Scoring(drawn, reward)
    ends = np.cumsum([len(one) for one in sets.values()]).tolist()
    parts = {name: drawn[end - len(one) : end] for (name, one), end in zip(sets.items(), ends, strict=True)}
    if len(sets) == 1:
        parts = dict.fromkeys(sets, drawn)
    if isinstance(reward, Mapping):
        for name, part in parts.items():
            parts[name] = yield Scoring(part, reward[name])
    return parts


def evaluation_of(rollouts: Rollouts, name: str = "", adapter: str | None = None) -> Evaluation:
    """Return what scored rollouts of one set say; DataError where none of them counts."""
    named = f"{name}@{adapter}" if adapter is not None else name
    of = f"the set {name!r}: " if name else ""
    if rollouts.rewards is None:
        raise DataError(f"{of}the environment gave no reward: give evaluate a reward function")
    found = Evaluation(float("nan"), rollouts, named)
    if not found.counted.any():
        raise DataError(f"{of}no completion counts: {found.left_out()}")
    return Evaluation(float(np.mean(rollouts.rewards[found.counted])), rollouts, named)


def _again(rollouts: Rollouts, name: str) -> Evaluation:
    """Return the evaluation that a checkpoint keeps the completions of."""
    return replace(evaluation_of(rollouts), name=name)


EvaluationLog.made_again = staticmethod(_again)


class Scoring:
    """A step of a verb that scores rollouts, in a thread of its own so that a stop is felt at once.

    A plain function stops after the completion it is at; one that hangs there cannot be cut and is left behind.
    """

    def __init__(self, rollouts: Rollouts, reward: Any) -> None:
        self._rollouts, self._reward, self._board = rollouts, reward, Board()
        self._asked: float | None = None
        self._outcome: Future[Rollouts] = Future()
        threading.Thread(target=self._run, name="rlbench scoring", daemon=True).start()

    def stop(self) -> None:
        """Ask it to stop; returns at once."""
        self._asked = self._asked or time.monotonic()
        self._board.stop()

    def result(self) -> Rollouts:
        """Wait and return the scored rollouts, or raise what scoring raised; Stopped has those with a reward."""
        while wait([self._outcome], POLL_S).not_done:
            if self._asked is not None and time.monotonic() - self._asked > FAREWELL_S:
                raise stopped(
                    self._rollouts,
                    self._board,
                    "; the reward goes on with the completion it is at, in a thread that cannot be cut: "
                    "rb.rewards.function(fn, isolate=True) can be",
                )
        return self._outcome.result()

    def _run(self) -> None:
        try:
            scored = score(self._rollouts, self._reward, board=self._board)
            self._outcome.set_result(made_with(scored, self._rollouts, reward=self._reward))
        except BaseException as error:  # for whoever waits for it, also a KeyboardInterrupt of the function's own
            self._outcome.set_exception(error)
