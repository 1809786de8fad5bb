"""A weight sync that starts on the ranks: any module of theirs to the replicas, with the proof of `engines.sync`.

Gathering is a collective of the ranks themselves; what the replicas are told is told by rank 0.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlbench.dispatch.chain import Chain, Steps
from rlbench.dispatch.link import shm_prefix
from rlbench.engines.inference import InferenceEngine
from rlbench.engines.rank_broadcast import announced, broadcast
from rlbench.engines.rank_place import RankPlace, led, stop_requested
from rlbench.engines.sync import Begun, Synced, begin_steps, probe_batch, prove_steps, record_proof
from rlbench.errors import StateError
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.memory import weight_tensors
from rlbench.strategies.memory_side import kept_on_host, reshard
from rlbench.trainers.forward import PolicyModel, evaluating
from rlbench.weights import facts
from rlbench.weights.manifest import Manifest, merged
from rlbench.weights.transport import Facts
from rlbench.workers.train_stage import STAGED, WeightSender

OWN_ENGINE = "actor"
"""The session's own training engine: the version of its weights is the session's."""


class RankSync:
    """One rank's part in bringing weights to the replicas. What it holds for that is reused from sync to sync."""

    def __init__(self, engine: InferenceEngine, place: RankPlace, strategy: StrategyBase) -> None:
        self._engine, self._place = engine, place
        self._strategy, self._control = strategy, strategy.control
        self._sender: WeightSender | None = None
        self._noted: dict[str, Any] | None = None
        self._facts = Facts(facts.node(), facts.address(), _gpus(strategy))
        # other strategies of these ranks stage as well; the session's end sweeps what its name starts
        token = led(self._control, "setup_inference_engine", lambda: secrets.token_hex(3))
        self._prefix = f"{shm_prefix(place.session)}{place.engine}-ranks-{token}"

    def update(self, module: nn.Module, transport: str | None) -> Synced:
        """Bring `module`'s weights to the replicas, prove them, commit their version; collective.

        Raises as `strategy.update_engine_weights`.
        """
        self._control.together("update_engine_weights", lambda: _need_here(module, self._strategy))
        dtype = compute_dtype(module, self._strategy)
        ranks = self._control.gather(self._facts)
        begun = led(self._control, "update_engine_weights", lambda: self._begin(dtype, ranks, transport))
        expected = self._expected(module, begun)
        sender = self._sender_of(module)
        staged = begun.choice.transport in STAGED
        if staged:
            manifest = self._staged(sender, begun)
        else:
            manifest = announced(sender, self._control, self._engine, begun, ranks)
        proof = led(self._control, "update_engine_weights", lambda: self._owed(begun, expected, dtype))
        try:
            if staged:
                led(self._control, "update_engine_weights", lambda: self._apply(manifest))
            else:
                broadcast(sender, self._control, self._engine, begun, manifest)
        finally:
            sender.release_staged()
        own = getattr(module, "_rank_context", None) is not None and self._place.engine == OWN_ENGINE
        return led(self._control, "update_engine_weights", lambda: self._prove(begun, manifest, proof, own))

    # -- of all ranks ----------------------------------------------------------------------------------------

    def _expected(self, module: nn.Module, begun: Begun) -> list[np.ndarray]:
        """The module's log-probs on the probe; every rank computes all of them, as there are few."""
        batch = probe_batch(begun.probe)
        model = PolicyModel(module, self._strategy.device.device, self._strategy.bf16)
        try:
            with torch.no_grad(), evaluating(module):
                with model.stats(batch, 1.0, packed=False, head="plain") as (logprobs, _, _):
                    flat = logprobs.float().cpu().numpy()
        finally:
            reshard(module)
        return [np.asarray(row) for row in np.split(flat, batch.responses.offsets[1:-1])]

    def _staged(self, sender: WeightSender, begun: Begun) -> Manifest:
        """All weights where the replicas can read them."""
        own = sender.stage(begun.choice.transport, self._prefix, ranks=begun.choice.senders)
        return merged([manifest for manifest in self._control.gather(own) if manifest is not None])

    def _sender_of(self, module: nn.Module) -> WeightSender:
        """What gathers this module; one at a time, since what it staged last lies in memory."""
        if self._sender is None or not self._sender.gives(module):
            if self._sender is not None:
                self._sender.close()
            self._sender = sender = WeightSender(module, self._control, stop_requested)
            weakref.finalize(self, sender.close)  # what is staged goes with the strategy …
            weakref.finalize(module, _call, weakref.WeakMethod(sender.close))  # … or with the module, which outlives it
        return self._sender

    # -- of rank 0 -------------------------------------------------------------------------------------------

    def _begin(self, dtype: str, ranks: list[Facts], transport: str | None) -> Begun:
        """Make room, refuse what cannot succeed, choose the transport."""
        held = self._engine.control("status")
        if any(state["weights"] in ("cpu", "meta") for state in held):
            self._engine.cuda("weights")
        begun: Begun = _done(begin_steps(self._engine, dtype, ranks, transport))
        return begun

    def _owed(self, begun: Begun, expected: list[np.ndarray], dtype: str) -> dict[str, Any]:
        """Put on record what the replicas will have to prove, under a version that no weights had before."""
        link = self._place.link
        state = link.state("version", "highest")
        version = 1 + max(int(state["highest"]), *(int(held["version"]) for held in begun.held))
        link.apply(*({"do": "set", "key": "version", "value": v} for v in (version, state["version"])))  # taken
        return record_proof(self._engine, begun, version, expected, dtype)

    def _apply(self, manifest: Manifest) -> None:
        self._engine.call_all("apply_weights", manifest, what="weight sync: applying").result()

    def _prove(self, begun: Begun, manifest: Manifest, proof: dict[str, Any], own: bool) -> Synced:
        version = int(proof["version"])
        gap = _done(prove_steps(self._engine, begun, proof))
        if own:
            self._place.link.set(version=version)
        if own and begun.choice.transport == "shm":
            self._note_staged(version, asdict(manifest))
        return Synced.of(manifest, version, begun.choice.transport, gap, str(proof["dtype"]))

    def _note_staged(self, version: int, manifest: dict[str, Any]) -> None:
        """As `TrainEngine.note_staged`: what `session.heal()` may go on from, beside what the kernel's syncs staged."""
        fields: dict[str, Any] = {"rank_staged_version": version}
        if manifest != self._noted:
            fields["rank_staged"] = manifest
        self._place.link.engine(self._place.engine, fields)
        self._noted = manifest


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (found := method()) is not None:
        found()


def compute_dtype(module: nn.Module, strategy: StrategyBase) -> str:
    """What a module computes in, by torch's name: as it was sharded, else as the strategy says."""
    held = next(module.parameters()).dtype
    found = torch.bfloat16 if strategy.bf16 else held
    if isinstance(module, FSDPModule):
        found = module._get_fsdp_state()._mp_policy.param_dtype or held
    return str(found).removeprefix("torch.")


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


def _gpus(strategy: StrategyBase) -> tuple[str, ...]:
    uuid = facts.gpu_uuid(strategy.device.device)
    return (uuid,) if uuid else ()


def _done(steps: Steps) -> Any:
    """Take steps to their end."""
    return Chain("weight sync", steps).result()
