"""What a loss says of texts that are not trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlbench.data.batches.batch import TrainBatch
from rlbench.rl import Aggregation, Loss
from rlbench.rl.lab import sources_of_gradient
from rlbench.trainers.passes.loss_value import evaluate
from rlbench.trainers.passes.metrics import MetricSums, measure
from rlbench.trainers.passes.step_plan import totals_of, whole_inputs


def metrics_of(
    loss: Loss, batch: TrainBatch, scored: list[dict[str, Any]], aggregation: Aggregation
) -> dict[str, float]:
    """Return the loss of a whole batch, and the metrics a training step on it would begin with.

    `scored`: what `PolicyStep.forward` gave on every rank.
    """
    inputs = whole_inputs(batch, scored, "recompute")
    for one in sources_of_gradient(inputs):
        one.requires_grad_()
    if getattr(loss, "needs_plan", False):
        inputs = replace(inputs, channels=loss.plan(inputs))  # type: ignore[attr-defined]
    weights = aggregation.weights(inputs.mask, totals_of(batch), inputs.group)
    total, own = evaluate(loss, inputs, weights)
    sums = MetricSums()
    measure(sums, inputs, own, float(total.detach()))
    return sums.result()
