"""Looks at a rank's gradients: those that wait for a step, and those that several losses would give.

Nothing is changed: gradients that wait are there afterwards, bit for bit, and the random states too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlbench.checkpoint.rank_state import random_state, set_random_state
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import RLBenchError, StateError
from rlbench.strategies.optim.gradients import local
from rlbench.strategies.optim.shard_sums import over_shards
from rlbench.strategies.ranks.control import on_all_ranks
from rlbench.trainers.update.options import PolicyOptions

if TYPE_CHECKING:
    from rlbench.nn import BaseTrainModule
    from rlbench.trainers.update.policy_step import PolicyStep
    from rlbench.workers.train.states import Residency

PIECE = 1 << 20
"""Entries of a gradient that are turned to float64 at a time."""


class GradientProbe:
    """Of one rank's module; every method is collective.

    Args:
        module: sharded, with its weights.
        policy: of the module.
        residency: where its weights are.
    """

    def __init__(self, module: BaseTrainModule, policy: PolicyStep, residency: Residency) -> None:
        self._module, self._policy, self._residency = module, policy, residency

    def facts(self) -> dict[str, Any]:
        """What the gradients that wait for a step are like, by parameter and by token.

        Returns:
            `names` of the trainable parameters, and (P,) of each, of all shards together: `squares` (sum of the
            gradient's), `largest` (of its finite entries), `zeros`, `nonfinite` (counts), `sizes`, `weight_squares`;
            float64. `batches`: for each batch that waits, this rank's `rows` and `channels`.

        Raises:
            StateError: no gradient waits.
        """
        self._residency.need("weights")
        if not self._policy.waiting:
            raise StateError(
                "no gradient waits for a step: session.forward_backward(batch, loss) makes one; train_step and "
                "optim_step use it up."
            )
        named = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        parameters = list(named.values())
        sums = over_shards(parameters, torch.stack([_sums(p) for p in parameters]))
        largest = over_shards(parameters, torch.stack([_largest(p) for p in parameters]), highest=True)
        columns = ("squares", "zeros", "nonfinite", "sizes", "weight_squares")
        return {
            "names": tuple(named),
            "largest": largest.cpu().numpy(),
            "batches": self._policy.token_gradients(),
            **{name: sums[:, i].cpu().numpy() for i, name in enumerate(columns)},
        }

    def of_losses(
        self, batch: TrainBatch, losses: dict[str, tuple[bytes, Any]], options: PolicyOptions | Mapping[str, Any]
    ) -> dict[str, Any]:
        """The whole gradients of several losses on one batch, compared; what waits for a step is not touched.

        Each loss takes a forward and a backward. Memory: of K losses, K - 1 copies of this rank's shards of the
        gradient in host memory, and one where gradients are.

        Args:
            batch: with its old log-probs, and reference log-probs where a loss needs them.
            losses: by name, the pickled loss and its aggregation.
            options: but for the aggregation.

        Returns:
            `names`: of the parameters; `losses`: of those that gave a gradient, K; `gram`: (P, K, K) float64, dot
            products of every two gradients by parameter, of all shards; `failed`: what the others raised, as text.

        Raises:
            Stopped: somebody asked to stop.
        """
        self._residency.need("weights")
        named = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        parameters = list(named.values())
        before = random_state()
        alone = replace(PolicyOptions.of(options), keep_tokens=False, whole_step=True)
        held: dict[str, list[Tensor | None]] = {}
        products: dict[tuple[str, str], Tensor] = {}
        failed: dict[str, str] = {}
        try:
            for name, (blob, aggregation) in losses.items():
                set_random_state(before)  # a dropout is the same for all
                with self._policy.gradients.aside(), self._residency.passing():
                    chosen = replace(alone, aggregation=aggregation)
                    try:
                        self._policy.forward_backward(batch, blob, chosen)
                    except Exception as error:
                        if not (isinstance(error, RLBenchError) or on_all_ranks(error)):
                            raise  # inside a pass: the peers may still be in its collectives
                        failed[name] = str(error)
                        continue
                    own = [None if p.grad is None else local(p.grad).detach() for p in parameters]
                    for other, theirs in [*held.items(), (name, own)]:
                        products[name, other] = torch.stack(
                            [_dot(p, a, b) for p, a, b in zip(parameters, own, theirs, strict=True)]
                        )
                    last = name == list(losses)[-1]
                    held[name] = [] if last else [None if g is None else g.cpu() for g in own]
        finally:
            set_random_state(before)
            self._residency.measure()
        gram = _gram(parameters, tuple(held), products)
        return {"names": tuple(named), "losses": tuple(held), "gram": gram, "failed": failed}


def _gram(parameters: list[Tensor], losses: tuple[str, ...], products: dict[tuple[str, str], Tensor]) -> np.ndarray:
    """(P, K, K) of the whole parameters."""
    count = len(losses)
    gram = torch.zeros(len(parameters), count, count, dtype=torch.float64)
    for i, one in enumerate(losses):
        for j, other in enumerate(losses[: i + 1]):
            gram[:, i, j] = gram[:, j, i] = products[one, other].cpu()
    device = local(parameters[0]).device
    found: np.ndarray = over_shards(parameters, gram.to(device)).cpu().numpy()
    return found


def _dot(parameter: Tensor, one: Tensor | None, other: Tensor | None) -> Tensor:
    """Of this rank's parts, float64; in pieces, so that no copy in float64 of a whole one is held."""
    device = local(parameter).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    if one is None or other is None:
        return total
    for a, b in zip(one.flatten().split(PIECE), other.flatten().split(PIECE), strict=True):
        total += torch.dot(a.to(device).double(), b.to(device).double())
    return total


def _sums(parameter: Tensor) -> Tensor:
    """Of this rank's part: squares, zeros, entries not finite, entries, squares of the weights; (5,) float64."""
    weights = local(parameter.detach())
    gradient = torch.zeros_like(weights) if parameter.grad is None else local(parameter.grad)
    squares = torch.zeros((), dtype=torch.float64, device=weights.device)
    of_weights = squares.clone()
    for part, weight in zip(gradient.flatten().split(PIECE), weights.flatten().split(PIECE), strict=True):
        squares += part.double().square().sum()
        of_weights += weight.double().square().sum()
    size = torch.tensor(gradient.numel(), device=weights.device)
    counts = [(gradient == 0).sum(), (~torch.isfinite(gradient)).sum(), size]
    return torch.stack([squares, *(count.double() for count in counts), of_weights])


def _largest(parameter: Tensor) -> Tensor:
    """The largest finite size of an entry of this rank's part, float64."""
    device = local(parameter).device
    gradient = None if parameter.grad is None else local(parameter.grad)
    if gradient is None or not gradient.numel():
        return torch.zeros((), dtype=torch.float64, device=device)
    return gradient.abs().nan_to_num(0.0, posinf=0.0).max().double()
