"""The session's reference policy, as its training ranks ask it for log-probs: its weights are there once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from rlbench.data.batches.batch import TrainBatch
from rlbench.data.batches.sequences import to_score
from rlbench.strategies.base import StrategyBase
from rlbench.workers.session.replicas import watched

DOING = "the reference's log-probs"


class RankReference:
    """One rank's hold on a frozen policy of its session: rank 0 asks that engine for the samples of all ranks.

    Args:
        engine: a training engine.
        session: as the rank reaches it.
        strategy: the rank's.
    """

    def __init__(self, engine: Any, session: Any, strategy: StrategyBase) -> None:
        self.engine, self._session, self._control = engine, session, strategy.control

    def logprobs(self, batch: TrainBatch, packing: bool, head: str) -> np.ndarray:
        """Return the log-probs of this rank's response tokens, (tokens,) float32; collective.

        Raises:
            StateError: the engine is offloaded, or gone.
            Stopped: this call was asked to stop.
        """
        self._session.refresh(self._control, self.engine)
        gathered = self._control.gather((list(batch.prompts), list(batch.responses)))
        prompts, responses = ([row for parts in gathered for row in parts[i]] for i in range(2))
        if not responses:
            return np.zeros(0, np.float32)

        def submit() -> Any:
            whole = to_score(prompts, responses, batch.temperature)
            return self.engine.call_logprobs(whole, {"packing": packing, "head": head}, DOING)

        rows = watched(self._control, DOING, submit)
        begins = np.cumsum([0, *(len(parts[1]) for parts in gathered)])
        shares = None if rows is None else [rows[a:b] for a, b in itertools.pairwise(begins)]
        mine = self._control.scatter(shares)
        return np.concatenate(mine).astype(np.float32) if mine else np.zeros(0, np.float32)
