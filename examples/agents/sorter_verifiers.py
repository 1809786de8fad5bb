"""The sorting task as a taskset of verifiers (0.4 or later), which knows nothing of rlbench.

    vf-eval sorter_verifiers --env.agent.harness.id null

plays it against any OpenAI-compatible server; `train_sorter.py --agent verifiers` trains on it.
"""

import itertools
import random
from collections.abc import Iterator

import verifiers.v1 as vf


class SortData(vf.TaskData):
    answer: str


class SortTask(vf.Task[SortData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1.0 where all digits are in order."""
        return float(trace.last_reply == self.data.answer)


class SortConfig(vf.TasksetConfig):
    seed: int = 0


class SortTaskset(vf.Taskset[SortTask, SortConfig]):
    INFINITE = True

    def load(self) -> Iterator[SortTask]:
        source = random.Random(self.config.seed)
        for _ in itertools.count():
            digits = "".join(source.choices("0123456789", k=source.randint(4, 8)))
            data = SortData(prompt=f"sort {digits}", answer="".join(sorted(digits)))
            yield SortTask(data, self.config.task)


__all__ = ["SortTaskset"]
