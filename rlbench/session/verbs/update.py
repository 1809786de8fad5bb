"""The verbs of a session that train; see `rlbench.session.training.steps`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from rlbench.data import TrainBatch
from rlbench.data.record.metrics import Metrics
from rlbench.dispatch.chain import Step
from rlbench.results import Done
from rlbench.session.core import SessionCore
from rlbench.session.state import step_copies
from rlbench.session.training import steps as training
from rlbench.trainers.update.options import PolicyOptions


def train_step(
    core: SessionCore,
    batch: TrainBatch,
    loss: Any = "grpo",
    *,
    aggregation: Any = None,
    token_budget: int | None = None,
    packing: bool = True,
    head: str = "auto",
    lr: float | None = None,
) -> Generator[Step, Any, Metrics]:
    """Exactly one optimizer step: `forward_backward` over micro-batches, then `optim_step`.

    Args:
        batch: from `rollouts.score(…).batch(…)`.
        loss: a name, a loss value, or a function `(LossInputs) -> (per_token, metrics)` as written in a cell.
        aggregation: how per-token losses become one: a mode's name or an `rb.rl.Aggregation`; None: the one the
            loss is meant for (`loss.aggregation`), "token-mean" for a function of your own.
        token_budget: tokens per micro-batch and rank; None: what keeps its activations near 4 GiB.
        packing: several sequences in one row without padding; False pads.
        head: "chunked" never holds the logits, "plain" does; "auto": chunked where the model allows it. The
            metrics' `head` says which it was, and why.
        lr: learning rate of this step alone; `session.lr = …` changes it for good. Groups of the optimizer that
            have rates of their own keep their ratio to the first one's.

    Returns:
        `Metrics` (or a `Pending` with `block=False`); its `seconds` are the step's, and the copy that is kept after
        it comes on top. An interrupt raises `rb.Stopped`: gradients are cleared and the optimizer is untouched.
    """
    options = PolicyOptions(aggregation=aggregation, token_budget=token_budget, packing=packing, head=head)
    return (yield from training.train_step_steps(core, batch, loss, options, lr))


def forward_backward(
    core: SessionCore,
    batch: TrainBatch,
    loss: Any = "grpo",
    *,
    aggregation: Any = None,
    token_budget: int | None = None,
    packing: bool = True,
    head: str = "auto",
) -> Generator[Step, Any, Metrics]:
    """Accumulate the gradient of `loss` on `batch`; `optim_step()` uses it, `zero_grad()` drops it."""
    options = PolicyOptions(aggregation=aggregation, token_budget=token_budget, packing=packing, head=head)
    return (yield from training.forward_backward_steps(core, batch, loss, options))


def optim_step(core: SessionCore, lr: float | None = None) -> Generator[Step, Any, Metrics]:
    """One optimizer step on the accumulated gradients, at rate `lr` where one is given; returns its `Metrics`."""
    done = yield from training.optim_step_steps(core, lr)
    yield from step_copies.after_step_steps(core)
    return Metrics(done)


def zero_grad(core: SessionCore) -> Done:
    """Drop the accumulated gradients."""
    core.train.call_all("policy_zero_grad", what="zero_grad").result()
    return Done("no gradient waits for a step")


def logprobs(core: SessionCore, batch: TrainBatch) -> Generator[Step, Any, np.ndarray]:
    """The trainer's log-probs of a batch's responses, flat float32."""
    return (yield from training.logprob_steps(core.train, batch, PolicyOptions()))


def set_lr(core: SessionCore, lr: float) -> Done:
    """Change the learning rate from now on; the same as `session.lr = lr`. Groups of the optimizer that have rates
    of their own keep their ratio to the first one's. A trainer's schedule goes on from it in proportion (StateError
    where that is at 0: before its first step)."""
    core.train.call_all("set_lr", float(lr), what="lr").result()
    return Done(f"lr {float(lr):g} from the next step on")
