"""What models say of samples, without gradient: log-probs of actor and reference, values, scores of reward models.

Sharded models meet in collectives, so every rank runs as many forwards as the one with the most samples; where its own
have ended it computes a fill that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rlbench.data.base.ragged import flat_index
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import EngineError
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.surface.memory_side import reshard
from rlbench.trainers.experience.over_ranks import agreed, check_stop
from rlbench.trainers.models.reward_heads import scores_of
from rlbench.trainers.models.value_model import check_critic, values_of
from rlbench.trainers.passes.forward import DUMMY, PolicyModel, evaluating

NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Stats:
    """Flat float32 beside the response tokens of a batch: log-probs, and entropies in nats."""

    logprobs: np.ndarray
    entropy: np.ndarray


class ModelStage:
    """Runs models over this rank's samples, `micro_batch` sequences in one forward.

    `packed` lays sequences one behind the other, without padding; `chunk_rows` takes log-probs straight from the output
    layer, so many rows of logits at once, None: from the logits.
    """

    def __init__(self, strategy: StrategyBase, micro_batch: int, packed: bool, chunk_rows: int | None) -> None:
        self._strategy = strategy
        self._micro_batch = micro_batch
        self._packed = packed
        self._chunk_rows = chunk_rows
        self._policies: dict[int, PolicyModel] = {}  # by module, which the PolicyModel holds

    def policy_stats(self, model: nn.Module, batch: TrainBatch, doing: str) -> Stats:
        """Return log-probs and entropies of the response tokens under a prepared policy; collective."""
        if id(model) not in self._policies:
            self._policies[id(model)] = PolicyModel(model, self._strategy.device.device, self._strategy.bf16)
        policy = self._policies[id(model)]
        agreed(self._strategy.control, doing, lambda: policy.check_tokens(batch))
        head = "plain" if self._chunk_rows is None else "chunked"
        found = np.full((2, batch.tokens), np.nan, np.float32)
        with self._computing(model):

            def compute(rows: np.ndarray) -> None:
                part = batch.rows(rows) if len(rows) else DUMMY
                with policy.stats(part, batch.temperature, self._packed, head, chunk_rows=self._chunk_rows) as stats:
                    if len(rows):
                        at = flat_index(batch.responses.offsets, rows)
                        found[:, at] = torch.stack(stats[:2]).float().cpu().numpy()

            self._each(batch.lengths, doing, compute)
        self._check_finite(doing, batch, found)
        return Stats(*found)

    def reference_logprobs(self, reference: Any, batch: TrainBatch) -> np.ndarray:
        """Return log-probs of the response tokens under the reference, flat float32; collective.

        `reference` is a module, or a policy that the session holds (`rlbench.workers.session.reference`).
        """
        doing = "the reference's log-probs"
        if isinstance(reference, nn.Module):
            return self.policy_stats(reference, batch, doing).logprobs
        head = "plain" if self._chunk_rows is None else "chunked"
        logprobs: np.ndarray = reference.logprobs(batch, self._packed, head)
        self._check_finite(doing, batch, logprobs[None])
        return logprobs

    def check_critic(self, critic: nn.Module) -> None:
        """Refuse a module that gives no values; collective."""
        with self._computing(critic):
            check_critic(critic, self._strategy.device.device)

    def values(self, critic: nn.Module, batch: TrainBatch) -> np.ndarray:
        """Return the critic's value of the state before each response token, flat float32; collective."""
        doing, found = "the critic's values", np.full(batch.tokens, np.nan, np.float32)
        device = self._strategy.device.device
        with self._computing(critic):

            def compute(rows: np.ndarray) -> None:
                part = batch.rows(rows) if len(rows) else DUMMY
                values = values_of(critic, part, device, self._packed)
                if len(rows):
                    found[flat_index(batch.responses.offsets, rows)] = values.float().cpu().numpy()

            self._each(batch.lengths, doing, compute)
        self._check_finite(doing, batch, found[None])
        return found

    def scores(self, model: nn.Module, sequences: Sequence[Sequence[int]], doing: str) -> np.ndarray:
        """Return a local reward model's score of each sequence of token ids, (B,) float64; collective.

        The model goes back to the host afterwards, so that only one is on the device.
        """
        with self._computing(model, send_away=True):
            found = scores_of(model, sequences, self._strategy, self._micro_batch)
        check_stop(self._strategy.control, doing)
        return found.double().numpy()

    # -- parts -------------------------------------------------------------------------------------------------

    def _check_finite(self, doing: str, batch: TrainBatch, found: np.ndarray) -> None:
        """Refuse numbers (k, tokens) of which one is not finite, on all ranks; collective."""

        def check() -> None:
            wrong = np.flatnonzero(~np.isfinite(found).all(0))
            if len(wrong):
                row = int(np.searchsorted(batch.responses.offsets, wrong[0], "right")) - 1
                raise EngineError(
                    f"{doing}: {len(wrong)} of {batch.tokens} tokens have numbers that are not finite, the first in "
                    f"sequence {row}. Look at the model's weights: an update may have spoilt them; load a checkpoint."
                )

        agreed(self._strategy.control, doing, check)

    @contextmanager
    def _computing(self, model: nn.Module, send_away: bool = False) -> Iterator[None]:
        """On the device, without dropout and gradient; one that was offloaded goes back whatever happens inside."""
        send_away = send_away or self._strategy.offloaded(model)
        self._strategy.reload_model(model)
        try:
            with torch.no_grad(), evaluating(model):
                yield
        finally:
            reshard(model)  # a forward that ended early leaves gathered parameters behind
            if send_away:
                self._strategy.offload_model(model)

    def _each(self, lengths: np.ndarray, doing: str, compute: Callable[[np.ndarray], None]) -> None:
        """`compute` the rows of each forward, short sequences first, as many forwards on every rank."""
        control = self._strategy.control
        order = np.argsort(lengths, kind="stable")
        own = [order[i : i + self._micro_batch] for i in range(0, len(order), self._micro_batch)]
        for k in range(max(control.gather(len(own)))):
            check_stop(control, doing)
            compute(own[k] if k < len(own) else NO_ROWS)
        check_stop(control, doing)
