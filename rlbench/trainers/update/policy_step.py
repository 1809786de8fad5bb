"""One rank's part of the session's verbs over whole batches: forward, forward_backward, optim_step.

Every rank holds the whole batch and makes the same plan of micro-batches; each computes its own rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import EngineError
from rlbench.rl import Aggregation, LossInputs
from rlbench.strategies.fsdp2 import FSDPV2Strategy
from rlbench.strategies.optim.optimizer_set import Stepped
from rlbench.strategies.surface.memory_side import holds_gradients, reshard
from rlbench.trainers.passes.loss_value import LossCache
from rlbench.trainers.passes.metrics import MetricSums, merged
from rlbench.trainers.passes.micro_batch import Slice, tokens_of_loss
from rlbench.trainers.passes.packing import plan_micro_batches
from rlbench.trainers.passes.token_keeper import TokenGradients, TokenKeeper
from rlbench.trainers.update.gradient_step import GradientStep, Pass
from rlbench.trainers.update.options import PolicyOptions
from rlbench.trainers.update.policy_pass import PolicyPass, Stats

Report = Callable[..., None]


class PolicyStep:
    """Policy verbs over one sharded module.

    Args:
        module: sharded, with its weights.
        strategy: the rank's.
        stop_requested: asked before each backward.
        report: called with progress (`done`, `total` micro-batches of this rank, `phase`; in the backward phase also
            its `tokens` so far and, of those that are trained on, `trained` and their part of the `loss`).
        optimizer: gives the one that has a say in the backward (`use_mp_opt`), or None.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: FSDPV2Strategy,
        stop_requested: Callable[[], bool],
        report: Report,
        optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None,
    ) -> None:
        self.module, self.strategy = module, strategy
        self.gradients = GradientStep(module, strategy, stop_requested, optimizer)
        self._report = report
        self._losses = LossCache()
        self.renew()

    def renew(self) -> None:
        """Look again at how the module is run: its class may be another one."""
        self._passes = PolicyPass(self.gradients)

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self._passes.model.vocab_size

    # -- verbs -----------------------------------------------------------------------------------------------

    def forward(self, batch: TrainBatch, options: PolicyOptions) -> dict[str, Any]:
        """What `PolicyPass.score` gives of this rank's rows; collective."""
        self._passes.check(batch, options)
        parts, count = self._split(batch, options)
        return self._passes.score(
            parts, count, options, "forward", lambda done: self._report(phase="forward", done=done, total=count)
        )

    def forward_backward(self, batch: TrainBatch, loss_blob: bytes, options: PolicyOptions) -> dict[str, Any]:
        """Add the gradients of `batch` to those that wait for the next step; collective.

        Args:
            batch: the whole batch, on every rank.
            loss_blob: a loss, or the name of one, by cloudpickle.

        Returns:
            `metrics` (of all ranks; equal on each), `aggregation`, `head`, `micro_batches`, `computed` (tokens the rank
            ran through the model) and `padding` (how many of them belong to no row), and as `forward` returns them the
            `rows` of this rank and their `channels`: also `old_logprobs`, `ref_logprobs` where there are any, and what
            the loss's metrics say per token.

        Raises:
            LossError: the loss gave something that cannot be trained on (gradients are cleared).
            Stopped: somebody asked to stop (gradients are cleared, random state is as before the call).
        """
        control, passes = self.strategy.control, self._passes
        loss = control.together("loading the loss", lambda: self._losses.load(loss_blob))
        passes.check(batch, options, loss)
        parts, count = self._split(batch, options)
        plan = passes.plan(loss, parts, count, batch, options)
        record = _Record(options, self.strategy.backward_scale(self.module))

        def one(index: int) -> Pass:
            part = parts[index] if index < len(parts) else None
            keep, watch = record.begin(part)
            return passes.loss(part, loss, pending, options, record.sums, plan, keep, watch)

        def after(index: int) -> None:
            record.end()
            so_far = record.sums.so_far(pending.share)
            self._report(phase="backward", done=index + 1, total=count, tokens=record.tokens, **so_far)

        aggregation = aggregation_of(loss, options.aggregation)
        with self.gradients.adding([batch], aggregation, whole_step=options.whole_step, shared=True) as pending:
            self.gradients.run(count, one, "forward_backward", after)
            control.together("the loss's calls", lambda: self._losses.need_unchanged(loss_blob))
        if not options.whole_step:
            self.gradients.beside.append(record.token_gradients)
        record.sums.scale(1 / pending.share)  # of these sequences alone
        return {
            "metrics": merged(control.gather(record.sums)),
            "aggregation": aggregation.mode,
            "head": "plain" if options.head == "plain" else passes.head_used(options),
            "micro_batches": count,
            "computed": record.computed,
            "padding": record.computed - record.tokens,
            **record.keeper.result(),
        }

    def optim_step(
        self,
        optimizer: Stepped,
        scheduler: Any = None,
        max_norm: float | None = None,
        whole_step: bool = False,
        rates: Sequence[float] | None = None,
    ) -> dict[str, Any]:
        """Clip and step; collective. Once the last vote is passed the step completes.

        Args:
            scheduler: stepped afterwards: one, several by name, or None.
            whole_step: the second half of a `train_step`; otherwise gradients of half a one are not stepped with.
            rates: learning rates of the optimizer's groups for this step alone; None: those they have.

        Returns:
            `metrics` (`grad_norm` before clipping, `lr` of the first group in this step,
            and with `rates` `lr_usual`), `stepped`, `skipped` (the reason, or None), and `seconds`.

        Raises:
            EngineError: no gradient waits. Stopped: gradients are cleared and nothing was stepped.
        """
        if not whole_step:
            self.gradients.drop_stale()
        if not holds_gradients(self.module):
            raise EngineError("there is no gradient to step with; call forward_backward(batch, loss) first.")
        usual = float(optimizer.param_groups[0]["lr"])
        with self.gradients.cleared_on_failure():
            self.gradients.vote("optim_step")
            begin = time.perf_counter()
            result = self.strategy.step_now(optimizer, self.module, scheduler, max_norm=max_norm, rates=rates)
            seconds = time.perf_counter() - begin
        self.gradients.forget()
        metrics = {"grad_norm": result["grad_norm"], "lr": usual if rates is None else rates[0]}
        if rates is not None:
            metrics["lr_usual"] = usual
        done = {"stepped": result["stepped"], "skipped": result["skipped"], "seconds": {"step": seconds}}
        return {"metrics": metrics, **done}

    @property
    def waiting(self) -> bool:
        """Whether gradients wait for a step."""
        self.gradients.drop_stale()
        return holds_gradients(self.module)

    def token_gradients(self) -> list[dict[str, Any]]:
        """`rows` and `channels` (see `TokenGradients`) of this rank, for each batch whose gradients wait."""
        self.gradients.drop_stale()
        return [tokens.result() for tokens in self.gradients.beside if isinstance(tokens, TokenKeeper)]

    def zero_grad(self) -> None:
        """Drop the gradients that wait, or that ended in the middle."""
        self.gradients.clear()

    def head_used(self, options: PolicyOptions) -> str:
        """See `PolicyPass.head_used`."""
        return self._passes.head_used(options)

    def budget(self, options: PolicyOptions, chunked: bool) -> int:
        """Tokens of one micro-batch on one rank, with or without logits to hold."""
        return options.budget(self.vocab_size, self._passes.model.token_bytes if chunked else None)

    # -- parts -----------------------------------------------------------------------------------------------

    def _split(self, batch: TrainBatch, options: PolicyOptions) -> tuple[list[Slice], int]:
        """This rank's micro-batches, and how many passes every rank makes; collective."""
        try:
            head = self._passes.model.prove(batch, options.packing, options.head)
        except BaseException:
            reshard(self.module)
            raise
        chunked = all(self.strategy.control.gather(head is not None))
        plan = plan_micro_batches(batch.lengths, self.strategy.world_size, self.budget(options, chunked))
        seen = self.strategy.control.gather((batch.key, len(plan[0])))
        if any(other != seen[0] for other in seen):
            raise EngineError(f"the ranks were given different batches ({seen}); give each the whole batch.")
        mine = plan[self.strategy.rank]
        return [Slice(batch.rows(rows), rows) for rows in mine if len(rows)], len(mine)


class _Record:
    """What one `forward_backward` keeps of its passes beside the gradients."""

    def __init__(self, options: PolicyOptions, scale: int) -> None:
        self._options, self._scale = options, scale
        self.sums, self.keeper = MetricSums(), TokenKeeper("logprobs", "entropy")
        self.token_gradients = TokenKeeper(*TokenGradients.NAMES)
        self.computed = self.tokens = 0
        self._running: tuple[Slice | None, TokenGradients | None] = None, None

    def begin(self, part: Slice | None) -> tuple[Callable[..., None], TokenGradients | None]:
        """What keeps of a pass, and what takes its tokens' gradients: nothing where nobody could ask for them."""
        watch = None if part is None or self._options.whole_step else TokenGradients(self._scale)
        self._running = part, watch
        return self._keep, watch

    def _keep(self, view: LossInputs, own: dict[str, Any], stats: Stats) -> None:
        logprobs, entropy, inputs = stats
        part = self._running[0]
        assert part is not None
        self.computed += inputs.input_ids.numel()
        self.tokens += sum(inputs.lengths)
        if self._options.keep_tokens:
            channels: dict[str, Tensor] = {"logprobs": logprobs, "entropy": entropy}
            self.keeper.add(part.rows, part.batch, channels | tokens_of_loss(view, own, inputs.grid))

    def end(self) -> None:
        """The backward is done."""
        part, watch = self._running
        if part is not None and watch is not None:
            self.token_gradients.add(part.rows, part.batch, watch.channels())


def aggregation_of(loss: Any, chosen: str | Aggregation | None) -> Aggregation:
    """How the tokens of a step become one number: as the caller chose, else as the loss is meant, else "token-mean".

    A function of the user's own says nothing of it; then every token counts the same, as in most losses of today.
    """
    return Aggregation.of(chosen or getattr(loss, "aggregation", None) or "token-mean")
