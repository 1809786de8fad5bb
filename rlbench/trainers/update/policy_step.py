"""One rank's part of the session's verbs over whole batches: forward, forward_backward, optim_step.

Every rank holds the whole batch and makes the same plan of micro-batches; each computes its own rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from rlbench.data.batches.batch import TrainBatch, as_batch
from rlbench.data.batches.verdicts import Verdicts
from rlbench.errors import EngineError, LossError
from rlbench.nn.lora import adapters_off
from rlbench.nn.quantised import quantised_layers
from rlbench.rl import Aggregation, Loss, LossInputs
from rlbench.rl.types import needs_of
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.memory.offloading import holds_gradients, reshard
from rlbench.strategies.optim.gradients import numbers_of
from rlbench.strategies.optim.optimizer_set import Stepped
from rlbench.strategies.steps import StepResult
from rlbench.trainers.passes.loss_value import LossCache
from rlbench.trainers.passes.metrics import MetricSums
from rlbench.trainers.passes.micro_batches import plan_micro_batches
from rlbench.trainers.passes.prefixes import kept_together
from rlbench.trainers.passes.sharing import own_slices
from rlbench.trainers.passes.step_plan import Slice, tokens_of_loss
from rlbench.trainers.passes.token_keeper import TokenGradients, TokenKeeper
from rlbench.trainers.update.gradient_step import GradientStep, Pass
from rlbench.trainers.update.loss_state import Due, LossStates
from rlbench.trainers.update.options import PolicyOptions
from rlbench.trainers.update.policy_pass import PolicyPass, Stats
from rlbench.trainers.update.stateful_loss import has_state

Report = Callable[..., None]
SMALL_WORK = 1 << 29
"""Tokens times parameters of a forward up to which one thread takes about as long as two: 24 tokens of 10 M parameters
23 and 21 ms, of which a product of 24 tokens with an adapter's matrix 0.03 and 0.11 ms."""


class PolicyStep:
    """Policy verbs over one sharded module.

    `report` is called with progress: `done`, `total` micro-batches of this rank, `phase`; in the backward phase also
    its `tokens` so far and, of those that are trained on, `trained` and their part of the `loss`. `replay`: of
    `PolicyPass`.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: StrategyBase,
        stop_requested: Callable[[], bool],
        report: Report,
        optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None,
        replay: bool = False,
    ) -> None:
        self.module, self.strategy, self._replay = module, strategy, replay
        self.gradients = GradientStep(module, strategy, stop_requested, optimizer)
        self._report = report
        self._judged: tuple[tuple[str, ...], list[float]] | None = None  # the heads' shares in what waits for a step
        self._losses, self.loss_states = LossCache(), LossStates(module, strategy.control, strategy.device.device)
        self.renew()

    def renew(self) -> None:
        """Look again at how the module is run: its class may be another one."""
        self._passes = PolicyPass(self.gradients, self._replay)

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self._passes.model.vocab_size

    def forward(self, batch: TrainBatch, options: PolicyOptions) -> dict[str, Any]:
        """What `PolicyPass.score` gives of this rank's rows; collective."""
        self._passes.check(batch, options)
        if not options.adapters:
            batch = batch.replace(routing=None)  # the base is the reference, which routes by itself
        options = self.decided(batch, options)
        if "logits" in options.needs:
            options = replace(options, head="plain")
        parts, count = self._split(batch, options)
        report = lambda done: self._report(phase="forward", done=done, total=count)  # noqa: E731
        with nullcontext() if options.adapters else adapters_off(self.module), self._threads(batch, options):
            return self._passes.score(parts, count, options, "forward", report)

    def forward_backward(self, batch: TrainBatch, loss_blob: bytes, options: PolicyOptions) -> dict[str, Any]:
        """Add the gradients of `batch`, the whole one, to those that wait for the next step; collective.

        `loss_blob`: a loss, or the name of one, by cloudpickle. Gives `metrics` (of all ranks), `aggregation`, `head`,
        `padded_as` (why rows are padded that were to be packed where that can be), `micro_batches`, `computed` (tokens
        the rank ran through the model), `padding` (those of them that belong to no row), `shared` (those of its rows
        that it did not run, their prompts being computed for another), and as `forward` the `rows` and their
        `channels`: also `old_logprobs`, `ref_logprobs` where there are any, and what the loss's metrics say per token.
        After a failure or a stop gradients are cleared.
        """
        loss = self.strategy.control.together("loading the loss", lambda: self._losses.load(loss_blob))
        with self.loss_states.lent(loss) as take_back:

            def over() -> None:
                take_back()
                self._losses.need_unchanged(loss_blob)

            return self._forward_backward(batch, loss, over, options)

    def _forward_backward(
        self, batch: TrainBatch, loss: Loss, over: Callable[[], None], options: PolicyOptions
    ) -> dict[str, Any]:
        """The same with the loss itself; `over` is called after its last call."""
        control, passes = self.strategy.control, self._passes
        passes.check(batch, options, loss)
        asked, options = options.packing, self.decided(batch, options)
        if "logits" in needs_of(loss):
            options = replace(options, head="plain")
        if batch.verdicts is not None:
            batch = batch.replace(verdicts=batch.verdicts.weighed())
        self._need_same_heads(batch.verdicts)
        parts, count = self._split(batch, options)
        plan = passes.plan(loss, parts, count, batch, options)
        aggregation = Aggregation.of_loss(loss, options.aggregation)
        sums, keeper, computed = MetricSums(), TokenKeeper(*passes.model.CHANNELS), [0, 0, 0]
        gradients = TokenKeeper(*TokenGradients.NAMES)
        scale = self.strategy.backward_scale(self.module) * self.strategy.loss_scale(self.module)
        watches: dict[int, TokenGradients] = {}  # nothing where nobody could ask for them

        def one(index: int) -> Pass:
            if index >= len(parts):
                return passes.loss(None, loss, pending, options, sums, plan)
            part = parts[index]
            if not options.whole_step:
                watches[index] = TokenGradients(scale)

            def keep(view: LossInputs, own: dict[str, Any], stats: Stats) -> None:
                found, inputs = stats
                if self.strategy.rows.index == 0:  # of all ranks that see the same
                    computed[0] += inputs.input_ids.numel()
                    computed[1] += sum(inputs.lengths)
                    if inputs.after is not None:
                        computed[2] += int(part.batch.lengths.sum()) - sum(inputs.lengths)
                if options.keep_tokens:
                    channels = found.channels(passes.model.CHANNELS) | tokens_of_loss(view, own, inputs.grid)
                    keeper.add(part.rows, part.batch, channels)

            return passes.loss(part, loss, pending, options, sums, plan, keep, watches.get(index))

        def after(index: int) -> None:
            if index in watches:
                gradients.add(parts[index].rows, parts[index].batch, watches.pop(index).channels())
            trained, so_far = sums.totals.get("tokens", 0.0), sums.totals.get("loss", 0.0) / pending.share
            given = {"tokens": computed[1], "trained": trained, "loss": so_far}
            self._report(phase="backward", done=index + 1, total=count, **given)

        with self.gradients.adding([batch], aggregation, whole_step=options.whole_step, shared=True) as pending:
            self.gradients.run(count, one, "forward_backward", after)
            control.together("the loss's calls", over)
        if not options.whole_step:
            self.gradients.beside.append(gradients)
        sums.scale(1 / pending.share)  # of these sequences alone
        whole = MetricSums.joined(self.strategy.rows.of_each(control.gather(sums)))
        if has_state(loss):
            self.gradients.beside.append(Due(loss, whole))
        return {
            "metrics": whole.result(),
            "aggregation": aggregation.mode,
            "head": passes.head_used(options),
            "padded_as": "" if asked is not None else passes.model.unpacked,
            "micro_batches": count,
            "computed": computed[0],
            "padding": computed[0] - computed[1],
            "shared": computed[2],
            **keeper.result(),
        }

    def optim_step(
        self,
        optimizer: Stepped,
        scheduler: Any = None,
        max_norm: float | None = None,
        whole_step: bool = False,
        rates: Sequence[float] | None = None,
        skip: str | None = None,
    ) -> dict[str, Any]:
        """Clip and step; collective. Once the last vote is passed the step completes.

        `scheduler`: stepped afterwards, one or several by name; `whole_step`: the second half of a `train_step`,
        otherwise gradients of half a one are not stepped with; `rates`: learning rates of the groups for this step
        alone; `skip`: why the gradients are dropped instead. Gives `metrics` (`grad_norm` before clipping, `lr`, with
        `rates` `lr_usual`, in float16 `loss_scale`), `stepped`, `skipped` (the reason, or None), and `seconds`.
        """
        if not whole_step:
            self.gradients.drop_stale()
        if not holds_gradients(self.module):
            raise EngineError("there is no gradient to step with; call forward_backward(batch, loss) first.")
        usual = float(optimizer.param_groups[0]["lr"])
        with self.gradients.cleared_on_failure():
            self.gradients.vote("optim_step")
            states = self.loss_states.updated([one for one in self.gradients.beside if isinstance(one, Due)])
            begin = time.perf_counter()
            if skip is None:
                result = self.strategy.step_now(optimizer, self.module, scheduler, max_norm=max_norm, rates=rates)
            else:
                self.strategy.forget_gradients(self.module)
                result = StepResult(stepped=False, grad_norm=None, skipped=skip)
            seconds = time.perf_counter() - begin
        if result["stepped"]:
            self.loss_states.keep(states)
        self.gradients.forget()
        metrics = {"grad_norm": result["grad_norm"], "lr": usual if rates is None else rates[0]}
        if "loss_scale" in result:
            metrics["loss_scale"] = result["loss_scale"]
        if rates is not None:
            metrics["lr_usual"] = usual
        done = {"stepped": result["stepped"], "skipped": result["skipped"], "seconds": {"step": seconds}}
        return {"metrics": metrics, **done}

    @contextmanager
    def slices(self, tokens: int) -> Iterator[None]:
        """See `own_slices`, once the model is proved to compute the same split; collective."""
        self._passes.model.prove(as_batch([np.arange(min(self.vocab_size, tokens))]), packed=False, head="plain")
        with own_slices(self.module, tokens, self.strategy.sequence, self.strategy.control):
            yield

    @contextmanager
    def _threads(self, batch: TrainBatch, options: PolicyOptions) -> Iterator[None]:
        """Let torch compute a forward of little work with the threads that are asked for, another with half of all."""
        before, is_small = torch.get_num_threads(), int(batch.lengths.sum()) * self._size <= SMALL_WORK
        if options.threads is not None:
            torch.set_num_threads(options.threads if is_small else max(options.threads, before // 2))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @cached_property
    def _size(self) -> int:
        """Numbers in all parameters, of quantised ones as many as there were."""
        quantised = sum(math.prod(layer.shape) for layer in quantised_layers(self.module).values())
        return quantised + numbers_of(self.module.parameters())

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

    def decided(self, batch: TrainBatch, options: PolicyOptions) -> PolicyOptions:
        """Return the options with `packing` as it will be; collective."""
        if options.packing is not None:
            return options
        if options.share_prompts:
            return replace(options, packing=True)
        packs = self.strategy.control.unanimous(self._passes.model.packs(batch))
        if not packs:
            reshard(self.module)  # it may have been left in the middle of a forward
        return replace(options, packing=packs)

    def head_used(self, options: PolicyOptions) -> str:
        """See `PolicyPass.head_used`."""
        return self._passes.head_used(options)

    def budget(self, options: PolicyOptions, chunked: bool) -> int:
        """Tokens of one micro-batch on one rank, with or without logits to hold."""
        return options.budget(self.vocab_size, self._passes.model.token_bytes if chunked else None, self._memory)

    @cached_property
    def _memory(self) -> int:
        """Bytes of the ranks' smallest GPU; 0 where they compute on hosts. Collective."""
        device = self.strategy.device
        return min(self.strategy.control.gather(device.memory)) if device.is_gpu else 0

    def _need_same_heads(self, verdicts: Verdicts | None) -> None:
        """Refuse pairs that judge heads in other shares than those whose gradients wait: no factor joins the means."""
        self.gradients.drop_stale()
        said = None if verdicts is None or verdicts.weights is None else (verdicts.heads, verdicts.weights.tolist())
        if self.gradients.pending is not None and said != self._judged:
            raise LossError(
                "the pairs judge heads in other shares than those whose gradients wait for a step, and the means over "
                "what was said of each head cannot be joined: give all pairs of a step to one call, or optim_step first"
            )
        self._judged = said

    def _split(self, batch: TrainBatch, options: PolicyOptions) -> tuple[list[Slice], int]:
        """This rank's micro-batches, and how many passes every rank makes; collective."""
        try:
            head = self._passes.model.prove(batch, options.packed, options.head, options.share_prompts)
        except BaseException:
            reshard(self.module)
            raise
        control, rows = self.strategy.control, self.strategy.rows
        chunked = control.unanimous(head is not None or not self._passes.model.holds_logits)
        budget = self.budget(options, chunked) * self.strategy.sequence.size
        lengths, together = batch.lengths, batch.pair
        if options.share_prompts:
            together, lengths = kept_together(batch, rows.count, budget)
        plan = plan_micro_batches(lengths, rows.count, budget, together)
        seen = control.gather((batch.key, len(plan[0]))) if control.world_size > 1 else []
        if any(other != seen[0] for other in seen):
            raise EngineError(f"the ranks were given different batches ({seen}); give each the whole batch.")
        mine = plan[rows.number]
        return [Slice(batch.rows(rows), rows) for rows in mine if len(rows)], len(mine)
