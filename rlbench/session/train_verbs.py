"""The verbs of a session that train; see `rlbench.session.training`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rlbench.data import TrainBatch
from rlbench.data.metrics import Metrics
from rlbench.dispatch.chain import Steps
from rlbench.results import Done
from rlbench.session import step_copies, training
from rlbench.session.recording import recorded
from rlbench.trainers.options import PolicyOptions

if TYPE_CHECKING:
    from rlbench.session.session import Session


class TrainVerbs:
    """What `Session` inherits: train_step, forward_backward, optim_step, zero_grad, logprobs, lr, set_lr."""

    @recorded
    def train_step(
        self,
        batch: TrainBatch,
        loss: Any = "grpo",
        *,
        aggregation: Any = None,
        token_budget: int | None = None,
        packing: bool = True,
        head: str = "auto",
        lr: float | None = None,
        block: bool = True,
    ) -> Any:
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
        me = cast("Session", self)
        return me._run("train_step", training.train_step_steps(me, batch, loss, options, lr), block)

    @recorded
    def forward_backward(
        self,
        batch: TrainBatch,
        loss: Any = "grpo",
        *,
        aggregation: Any = None,
        token_budget: int | None = None,
        packing: bool = True,
        head: str = "auto",
        block: bool = True,
    ) -> Any:
        """Accumulate the gradient of `loss` on `batch`; `optim_step()` uses it, `zero_grad()` drops it."""
        options = PolicyOptions(aggregation=aggregation, token_budget=token_budget, packing=packing, head=head)
        me = cast("Session", self)
        return me._run("forward_backward", training.forward_backward_steps(me, batch, loss, options), block)

    @recorded
    def optim_step(self, lr: float | None = None, block: bool = True) -> Any:
        """One optimizer step on the accumulated gradients, at rate `lr` where one is given; returns its `Metrics`."""
        me = cast("Session", self)

        def steps() -> Steps:
            done = yield from training.optim_step_steps(me, lr)
            yield from step_copies.after_step_steps(me)
            return Metrics(done)

        return me._run("optim_step", steps(), block)

    @recorded
    def zero_grad(self) -> Done:
        """Drop the accumulated gradients."""
        cast("Session", self).train.call_all("policy_zero_grad", what="zero_grad").result()
        return Done("no gradient waits for a step")

    @recorded
    def logprobs(self, batch: TrainBatch) -> Any:
        """The trainer's log-probs of a batch's responses, flat float32."""
        me = cast("Session", self)
        return me._run("logprobs", training.logprob_steps(me.train, batch, PolicyOptions()), True)

    @property
    def lr(self) -> float:
        """The learning rate; set it to change it for the next step."""
        return float(cast("Session", self).train.control("status")[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        self.set_lr(value)

    @recorded
    def set_lr(self, lr: float) -> Done:
        """Change the learning rate from now on; the same as `session.lr = lr`. Groups of the optimizer that have rates
        of their own keep their ratio to the first one's. A trainer's schedule goes on from it in proportion (StateError
        where that is at 0: before its first step)."""
        cast("Session", self).train.call_all("set_lr", float(lr), what="lr").result()
        return Done(f"lr {float(lr):g} from the next step on")
