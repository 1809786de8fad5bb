"""A reward model as a pass computes it: the score after each response token, where a policy has its log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from rlbench.data.batches.batch import TrainBatch
from rlbench.trainers.models.scalar_model import heads_of, in_all
from rlbench.trainers.models.value_model import valued, why_unpacked
from rlbench.trainers.passes.forward import PolicyModel
from rlbench.trainers.passes.outputs import TokenOutputs
from rlbench.trainers.passes.packing import ModelInputs

SCALAR = "scores: a reward model has no vocabulary to predict"


class ScoreModel(PolicyModel):
    """One sharded `ScalarHeadModel`; what a policy's passes ask of a `PolicyModel`, of scores."""

    CHANNELS: ClassVar[tuple[str, ...]] = ("scores",)
    holds_logits: ClassVar[bool] = False

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of several heads; none of one."""
        return tuple(heads_of(self.module))

    def head_used(self, packed: bool) -> str:
        """Say that there is no vocabulary."""
        return SCALAR

    def prove(self, batch: TrainBatch, packed: bool, head: str = "auto", share_prompts: bool = False) -> None:
        """Prove once that scores are the same packed; collective."""
        if packed or self.ranks.size > 1:
            self._prove_packing(batch)

    def _why_unpacked(self, batch: TrainBatch, share_prompts: bool = False) -> str:
        return why_unpacked(self.module, self.device, self.ranks)

    @contextmanager
    def stats(
        self, rows: TrainBatch, temperature: float, packed: bool, *given: Any, balance: bool = False, **unused: Any
    ) -> Iterator[tuple[TokenOutputs, ModelInputs]]:
        """Give the scores (R,) after the response tokens of `rows`; run the backward inside the context."""
        with valued(self.module, rows, self.device, packed, after=1, ranks=self.ranks, balance=balance) as (
            scores,
            inputs,
        ):
            by_head = scores if scores.dim() == 2 else None
            scores = in_all(self.module, scores)
            unknown = torch.full_like(scores.detach(), torch.nan)
            yield TokenOutputs(unknown, unknown, scores=scores, head_scores=by_head), inputs
