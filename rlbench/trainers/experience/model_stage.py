"""What models say of samples, without gradient: log-probs of actor and reference, values, scores of reward models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import EngineError
from rlbench.nn.lora import adapters_off
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.memory.offloading import reshard
from rlbench.trainers.experience.over_ranks import agreed, check_stop
from rlbench.trainers.models.policy_module import BasePolicy
from rlbench.trainers.models.reward_heads import head_scores_of
from rlbench.trainers.models.scalar_model import heads_of, in_all
from rlbench.trainers.models.value_model import check_critic, values_of
from rlbench.trainers.passes.forward import DUMMY, PolicyModel, evaluating
from rlbench.trainers.passes.prefixes import same_rows


class ModelStage:
    """Runs models over this rank's samples, `micro_batch` sequences in one forward; every method is collective.

    `packed` lays sequences one behind the other, without padding; `chunk_rows` takes log-probs straight from the output
    layer, so many rows of logits at once, None: from the logits. `head`: see `PolicyOptions`; None: as `chunk_rows`.
    `share_prompts`: policies compute a prompt once for its samples in a micro-batch, in which they go together.
    """

    def __init__(
        self,
        strategy: StrategyBase,
        micro_batch: int,
        packed: bool,
        chunk_rows: int | None,
        head: str | None = None,
        share_prompts: bool = False,
    ) -> None:
        self._strategy, self._device = strategy, strategy.device.device
        self._micro_batch, self._packed, self._chunk_rows = micro_batch, packed, chunk_rows
        self._share_prompts = share_prompts
        self._head = head or ("plain" if chunk_rows is None else "chunked")
        self._policies: dict[tuple[int, bool], PolicyModel] = {}  # by module, which the PolicyModel holds, and `replay`

    def policy_stats(self, model: nn.Module, batch: TrainBatch, doing: str, replay: bool = False) -> np.ndarray:
        """Return log-probs and entropies of the response tokens under a prepared policy, (2, tokens) float32; `replay`:
        its routers take the experts that the batch brings."""
        key = id(model), replay
        if key not in self._policies:
            half, ranks = self._strategy.half is not None, self._strategy.sequence
            self._policies[key] = PolicyModel(model, self._device, half, ranks, self._strategy.control, replay)
        policy = self._policies[key]
        share, order = self._share_prompts, None

        def check() -> None:
            policy.check_tokens(batch)
            if share:
                policy.check_shared(batch)

        agreed(self._strategy.control, doing, check)
        if share:
            order = np.lexsort((batch.lengths, same_rows(batch.prompts)))

        def stats(part: TrainBatch) -> Tensor:
            given = batch.temperature, self._packed, self._head
            with policy.stats(part, *given, chunk_rows=self._chunk_rows, share_prompts=share) as (found, _):
                return torch.stack([found.logprobs, found.entropy])

        return self._each(model, batch, 2, doing, stats, order)

    def reference_logprobs(self, reference: Any, batch: TrainBatch) -> np.ndarray:
        """Return log-probs of the response tokens under the reference, flat float32.

        `reference` is a module, an adapted policy's base, or a policy that the session holds
        (`rlbench.workers.session.reference`).
        """
        doing = "the reference's log-probs"
        if isinstance(reference, BasePolicy):
            with adapters_off(reference.module):
                return self.policy_stats(reference.module, batch, doing)[0]
        if isinstance(reference, nn.Module):
            return self.policy_stats(reference, batch, doing)[0]
        found = reference.logprobs(batch, self._packed, self._head, self._share_prompts)
        self._check_finite(doing, batch, found[None])
        return found

    def check_critic(self, critic: nn.Module) -> None:
        """Refuse a module that gives no values."""
        with self._computing(critic):
            check_critic(critic, self._device)

    def values(self, critic: nn.Module, batch: TrainBatch) -> np.ndarray:
        """Return the critic's value of the state before each response token, flat float32."""
        ranks = self._strategy.sequence
        values = lambda part: values_of(critic, part, self._device, self._packed, ranks)[None]  # noqa: E731
        return self._each(critic, batch, 1, "the critic's values", values)[0]

    def scores(
        self, model: nn.Module, sequences: Sequence[Sequence[int]], doing: str, media: Sequence[Any] = ()
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return a local reward model's score of each sequence of token ids, with its images or sounds, (B,) float64;
        of several heads also theirs, by name.

        The model goes back to the host afterwards, so that only one is on the device.
        """
        with self._computing(model, send_away=True):
            found = head_scores_of(model, sequences, self._strategy, self._micro_batch, media)
        check_stop(self._strategy.control, doing)
        heads = heads_of(model)
        by_head = {name: found[:, i].double().numpy() for i, name in enumerate(heads)}
        return (in_all(model, found) if heads else found[:, 0]).double().numpy(), by_head

    def _each(
        self,
        model: nn.Module,
        batch: TrainBatch,
        width: int,
        doing: str,
        compute: Callable[[TrainBatch], Tensor],
        order: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return (width, tokens) of what `compute` gives of each micro-batch, in an `order` of the rows (B,), or short
        sequences first.

        Sharded models meet in collectives: a rank whose own samples have ended computes a fill that nobody reads. Ranks
        that see the same rows compute those of each other with their own.
        """
        control, found = self._strategy.control, np.full((width, batch.tokens), np.nan, np.float32)
        order, beside = np.argsort(batch.lengths, kind="stable") if order is None else order, np.arange(batch.tokens)
        own = [order[i : i + self._micro_batch] for i in range(0, len(order), self._micro_batch)]
        parts, first = self._strategy.rows.shared([batch.rows(rows) for rows in own])
        with self._computing(model):
            for k in range(max(control.gather(len(parts)))):
                check_stop(control, doing)
                numbers = compute(parts[k] if k < len(parts) else DUMMY)
                if first <= k < first + len(own):
                    found[:, batch.responses.pick(beside, own[k - first])] = numbers.float().cpu().numpy()
            check_stop(control, doing)
        self._check_finite(doing, batch, found)
        return found

    def _check_finite(self, doing: str, batch: TrainBatch, found: np.ndarray) -> None:
        """Refuse numbers (k, tokens) of which one is not finite, on all ranks."""

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
