"""Jobs with an environment, and what comes back, by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from rlbench.data import Prompt, Ragged
from rlbench.data.rollouts.jobs import FINISH_REASONS, EnvJob, GeneratedArrays, GenerateJob
from rlbench.envs import Env, Step

CHAT = [{"role": "user", "content": "hi"}]
IM_END = 258  # the third special token behind 256 bytes: <|im_end|>
Lane = Callable[..., Any]


def job(
    prompts: list[Any],
    env: Any = None,
    n: int = 1,
    max_turns: int = 3,
    total: int | None = None,
    timeout_s: float | None = 30.0,
    seed: int = 7,
    **sampling: Any,
) -> GenerateJob:
    """As the driver makes it; seeds depend on (prompt, sample) alone."""
    seeds = np.array([[seed * 1_000_003 + p * 1009 + s for s in range(n)] for p in range(len(prompts))], np.int64)
    made = None if env is None else EnvJob(cloudpickle.dumps(env), max_turns, total, timeout_s)
    asked = tuple(Prompt(p, label=i) for i, p in enumerate(prompts))
    return GenerateJob(prompts, n, {"max_tokens": 6, **sampling}, seeds, asked=asked, env=made)


UNCUT = {"ignore_eos": True, "max_tokens": 4}
"""Every turn has four tokens."""


class Rows:
    """A replica's arrays by (prompt, sample)."""

    def __init__(self, arrays: GeneratedArrays) -> None:
        self.arrays = arrays
        self.keys = [(int(p), int(s)) for p, s in arrays.keys]

    def of(self, name: str, key: tuple[int, int] = (0, 0)) -> list[Any]:
        return list(Ragged(getattr(self.arrays, name), self.arrays.offsets)[self.keys.index(key)].tolist())

    def info(self, key: tuple[int, int] = (0, 0)) -> dict[str, Any]:
        return self.arrays.infos[self.keys.index(key)]

    def finish(self, key: tuple[int, int] = (0, 0)) -> str:
        return FINISH_REASONS[self.arrays.finish[self.keys.index(key)]]


class Echo(Env):
    """Goes on until the turns are used up; rewards count turns."""

    def __init__(self, said: Any = "go on", role: str | None = "user") -> None:
        self.said, self.role = said, role

    def step(self, turn):
        return Step(self.said, reward=float(turn.number), info={"text": turn.text})
