"""A weight sync that starts on the ranks: any module of theirs to the replicas, by the steps of `rlbench.weights.sync`.

Gathering is a collective of the ranks themselves; rank 0 asks the replicas for all of them.
"""

from __future__ import annotations

import functools
import secrets
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlbench.data.batches.batch import as_batch
from rlbench.dispatch import context
from rlbench.dispatch.chain import Steps, run
from rlbench.dispatch.link import shm_prefix
from rlbench.errors import StateError, Stopped
from rlbench.nn.lora import Adapted
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.generation.engine import led
from rlbench.strategies.internals import fsdp_dtype
from rlbench.strategies.memory.offloading import kept_on_host, reshard
from rlbench.strategies.memory.owners import weight_tensors
from rlbench.trainers.passes.forward import PolicyModel, evaluating
from rlbench.weights import facts
from rlbench.weights.crossing import per_replica, send_while_applying
from rlbench.weights.manifest import Handover, Manifest, merged
from rlbench.weights.probe import Probe
from rlbench.weights.sync import Event, Synced, engine_event, sync_steps
from rlbench.weights.transport import Choice, Facts
from rlbench.workers.train.stage import WeightSender

DOING = "update_engine_weights"
OWN_ENGINE = "actor"
"""The session's own training engine: the version of its weights is the session's."""


class RankSync:
    """One rank's part in bringing weights to the replicas. What it holds for that is reused from sync to sync."""

    def __init__(self, engine: Any, session: Any, strategy: StrategyBase) -> None:
        self.engine, self._session, self.strategy = engine, session, strategy
        self._sender: WeightSender | None = None
        self._noted: Manifest | None = None
        uuid = facts.gpu_uuid(strategy.device.device)
        self.facts = Facts(facts.node(), facts.address(), (uuid,) if uuid else ())
        # other strategies of these ranks stage as well; the session's end sweeps what its name starts
        token = led(strategy.control, "setup_inference_engine", lambda: secrets.token_hex(3))
        self.prefix = f"{shm_prefix(session.name)}{session.engine}-ranks-{token}"

    def update(self, module: nn.Module, transport: str | None) -> Synced:
        """Bring `module`'s weights to the replicas, prove them, commit their version; collective."""
        control = self.strategy.control
        control.together(DOING, lambda: _need_here(module, self.strategy))

        def make_room() -> None:
            if any(state["weights"] in ("cpu", "meta") for state in self.engine.control("status")):
                self.engine.cuda("weights")

        led(control, DOING, make_room)

        def lead(steps: Steps) -> Steps:
            yield from ()
            return led(control, DOING, lambda: run(steps))

        source = ModuleSource(module, self._sender_of(module), self)
        return run(sync_steps(source, self.engine, transport, lead))

    def new_version(self, held: Sequence[int]) -> int:
        """Take a version that no weights of the session had before."""
        state = self._session.link.state("version", "highest")
        version = 1 + max(int(state["highest"]), *held)
        values = (version, state["version"])
        self._session.link.apply(*({"do": "set", "key": "version", "value": value} for value in values))
        return version

    def adapter(self, module: nn.Module) -> int:
        """Return the number that the module's adapter has in the replicas, the session's branch's; 0 without one."""
        if not Adapted.of(module):
            return 0

        def number() -> int:
            state = self._session.link.state("branch", "adapters")
            return int(state["adapters"].get(state["branch"], 1))

        return led(self.strategy.control, DOING, number)

    def events(self, module: nn.Module, version: int, manifest: Manifest) -> list[Event]:
        """Of the session's own policy, make the version the session's; note what `session.heal()` may go on from."""
        if getattr(module, "_rank_context", None) is None or self._session.engine != OWN_ENGINE:
            return []
        events: list[Event] = [{"do": "set", "key": "version", "value": version}]
        if manifest.transport == "shm" and not Adapted.of(module):
            fields: dict[str, Any] = {"rank_staged_version": version}
            if (layout := manifest.whole()) != self._noted:
                fields["rank_staged"], self._noted = asdict(layout), layout
            events.append(engine_event(self._session.engine, fields))
        return events

    def _sender_of(self, module: nn.Module) -> WeightSender:
        if self._sender is None or not self._sender.gives(module):
            if self._sender is not None:
                self._sender.close()
            sender = WeightSender(module, self.strategy.control, lambda: context.current().stop_requested())
            self._sender = sender
            weakref.finalize(self, sender.close)  # what is staged goes with the strategy …
            weakref.finalize(module, _closed, weakref.ref(sender))  # … or with the module, which outlives it
        return self._sender


def _closed(sender: weakref.ref[WeightSender]) -> None:
    if (alive := sender()) is not None:
        alive.close()


class ModuleSource:
    """A module of the ranks as the trainer's end of a sync, on each of them: a `WeightSource`; all is collective."""

    apart = False

    def __init__(self, module: nn.Module, sender: WeightSender, sync: RankSync) -> None:
        self._module, self._sender, self._sync = module, sender, sync
        self._engine, self._strategy, self._control = sync.engine, sync.strategy, sync.strategy.control
        self._sends = False
        self.dtype, self.adapter = compute_dtype(module, sync.strategy), sync.adapter(module)
        self.new_version = sync.new_version
        self.events = functools.partial(sync.events, module)

    def facts(self) -> list[Facts]:
        return self._control.gather(self._sync.facts)

    def logprobs(self, probe: Probe) -> Steps:
        """The module's log-probs; every rank computes all of them, as there are few."""
        yield from ()
        batch = as_batch(probe.tokens, probe.media)
        model = PolicyModel(self._module, self._strategy.device.device, self._strategy.half is not None)
        try:
            with torch.no_grad(), evaluating(self._module):
                with model.stats(batch, 1.0, packed=False, head="plain") as (found, _):
                    flat = found.logprobs.float().cpu().numpy()
        finally:
            reshard(self._module)
        return [np.asarray(row) for row in np.split(flat, batch.responses.offsets[1:-1])]

    def stage(self, choice: Choice, adapter: int, handover: Handover) -> Steps:
        yield from ()
        options: dict[str, Any] = {"ranks": choice.senders, "adapter": adapter, "handover": handover}
        return merged(self._control.gather(self._sender.stage(choice.transport, self._sync.prefix, **options)))

    def announce(self, sender: int, options: dict[str, Any]) -> Steps:
        yield from ()
        self._sends = self._control.rank == sender
        return self._control.gather(self._sender.announce(**options))[sender]

    def broadcast(self, manifest: Manifest, workers: list[int]) -> Steps:
        """Gather all weights and send them; the rank that sends asks the replicas to receive, and watches them. Return
        the bytes that were sent."""
        yield from ()
        to = self._engine.name

        def submit() -> list[Any]:
            try:
                return list(self._engine.apply_each(per_replica(manifest, workers))) if self._sends else []
            except Exception as error:
                self._sender.give_up(to, f"the replicas could not be called: {error}")
                raise

        calls = self._control.together(DOING, submit)
        sent: list[int] = []
        cause = send_while_applying(
            lambda: sent.append(self._sender.send(to, manifest)),
            calls,
            lambda reason: self._sender.give_up(to, reason),
            to,
        )
        if any(self._control.gather(isinstance(cause, Stopped))):
            raise Stopped("weight sync stopped before anything was sent; the replicas keep their weights")
        self._control.raise_together("sending weights", cause if isinstance(cause, Exception) else None)
        return sum(self._control.gather(sum(sent)))

    def release(self, choice: Choice) -> Steps:
        yield from ()
        self._sender.release_staged()


def compute_dtype(module: nn.Module, strategy: StrategyBase) -> str:
    """Return what a module computes in, by torch's name: as it was sharded, else as the strategy says."""
    held = next(module.parameters()).dtype
    dtype = strategy.half or held
    if isinstance(module, FSDPModule):
        dtype = fsdp_dtype(module) or held
    return str(dtype).removeprefix("torch.")


def _need_here(module: nn.Module, strategy: StrategyBase) -> None:
    """Refuse weights that are offloaded: they cannot be gathered, nor compute."""
    tensors = [tensor for tensor in weight_tensors(module) if tensor.numel()]
    gone = any(tensor.is_meta or not tensor.untyped_storage().nbytes() for tensor in tensors)
    away = strategy.device.is_gpu and any(tensor.device.type == "cpu" for tensor in tensors)
    if gone or (away and not kept_on_host(module)):
        raise StateError(
            f"update_engine_weights: the weights of {type(module).__name__} are offloaded; "
            "strategy.reload_model(actor) first (for the session's own module: session.train.cuda('weights'))"
        )
