"""One training rank: a module, its strategy, and the verbs an engine calls; a plain object that knows nothing of
Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlbench.checkpoint.rank_state import optimizers_of
from rlbench.defaults import Default, precision
from rlbench.dispatch import context
from rlbench.errors import BuildError, StateError
from rlbench.nn import BaseTrainModule, RankContext, callable_methods, check_module
from rlbench.nn.base import executor_for, guard_forward
from rlbench.nn.lora import Adapted
from rlbench.nn.quantised import quantised_layers
from rlbench.strategies.base import StrategyBase, arguments_of
from rlbench.strategies.fsdp1 import FSDP1Strategy
from rlbench.strategies.fsdp2 import FSDPV2Strategy
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.memory.offloading import reshard
from rlbench.strategies.optim.gradients import numbers_of
from rlbench.strategies.options.config import ROW_SHARING
from rlbench.strategies.ranks.control import issued_collectives
from rlbench.strategies.sharding.materialize import allocate, materialize
from rlbench.strategies.sharding.sources import locate
from rlbench.trainers.passes.chunked_head import hidden_size
from rlbench.trainers.passes.routing import check_replayed
from rlbench.trainers.update.policy_step import PolicyStep
from rlbench.weights import facts
from rlbench.weights.manifest import Manifest
from rlbench.weights.memory import release_caches
from rlbench.weights.names import transformers_class
from rlbench.weights.transport import Facts
from rlbench.workers.train.cells import Cells
from rlbench.workers.train.config import TrainConfig
from rlbench.workers.train.group import RankGroup
from rlbench.workers.train.keeping import Keeping
from rlbench.workers.train.lending import Lending
from rlbench.workers.train.namespace import Namespace
from rlbench.workers.train.optimizers import one_optimizer
from rlbench.workers.train.parts import RankParts, verbs_of
from rlbench.workers.train.policy import Policy
from rlbench.workers.train.probes import Probes
from rlbench.workers.train.redefine import Redefining
from rlbench.workers.train.setup import TrainingSetup
from rlbench.workers.train.snapshots import Snapshots
from rlbench.workers.train.stage import WeightSender
from rlbench.workers.train.states import Residency
from rlbench.workers.train.trainer import HeldTrainer
from rlbench.workers.train.whole import checksum

if TYPE_CHECKING:
    from rlbench.workers.train import verbs

HOLDERS: dict[str, type[StrategyBase]] = {"fsdp2": FSDPV2Strategy, "fsdp1": FSDP1Strategy}
OF_THE_STRATEGY = ("adam_offload", "use_mp_opt", "fsdp_cpu_offload", *ROW_SHARING)


class TrainRank:
    """Built in two calls: `rendezvous` on rank 0, then `build` on all ranks at once. Verbs are methods here, or of the
    component that `VERBS` names; all but those of `CONTROL`, `rendezvous` and `register` are collective."""

    VERBS = verbs_of([Cells, HeldTrainer, Keeping, Lending, Policy, Probes, Redefining, Snapshots, TrainingSetup])
    CONTROL = frozenset({"status", "memory", "sync_facts", "give_up_sync", "complete_names"})

    def __init__(self, rank: int, world_size: int, config: TrainConfig) -> None:
        self.rank, self.world_size, self.config = rank, world_size, config
        named = facts.INTERFACE in os.environ and config.host == facts.LOOPBACK
        self._host = facts.address() if named else config.host
        self._group = RankGroup(rank, world_size, self._host, config.timeout_s)
        self._module: BaseTrainModule | None = None
        self._parts: RankParts | None = None
        self._components: dict[type, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """The verbs of the components."""
        owner = type(self).VERBS.get(name)
        if owner is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self._built()
        return getattr(self._components[owner], name)

    def begins(self, verb: str) -> None:
        """Take note that the host calls `verb` now. Never blocks."""
        if self._components:
            self._components[Snapshots].begins(verb)

    def settle(self) -> None:
        """Do what calls left for later: the host asks on its control lane, while no call runs. Never blocks."""
        if self._parts is not None:
            self._parts.residency.settle()

    def rendezvous(self) -> tuple[str, int] | None:
        """Start the store on rank 0 and return its address; None on the others."""
        return self._group.serve()

    def register(self, epoch: int, seq: int, timeout_s: float, given_up: Callable[[], bool]) -> bool:
        """Agree with all ranks that they have call (epoch, seq); False on all if one has not in time, or `given_up`."""
        agreed = self._group.register(epoch, seq, timeout_s, given_up)
        if agreed and self._group.take_failure():
            reshard(self._built().module)  # a rank that failed holds no gathered parameter any more, so nobody may
        return agreed

    def issued_collectives(self) -> int:
        """How many collectives this rank has issued: one that waits for a peer has issued more. Never blocks."""
        return issued_collectives()

    def build(self, module_blob: bytes, master: tuple[str, int]) -> dict[str, Any]:
        """Join the ranks at `master`, make the module (on meta, or by a callable), shard it, load its weights, run its
        hook; collective."""
        if self._module is not None:
            raise BuildError("this train engine is built already; close() it, or make another one.")
        config, report = self.config, context.current().report
        here = config.local_ranks or self.world_size
        torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // here))
        device = RankDevice.pick(self.rank, config.device)
        report(phase="joining the ranks")
        self._group.join(master, device)
        report(phase="making the module")
        strategy = HOLDERS[config.executor](
            **{**arguments_of(config), "bf16": False},
            args={name: getattr(config, name) for name in OF_THE_STRATEGY},
            device=device,
        )
        strategy.set_seed()
        module = strategy.control.together("making the module", lambda: _unpickled(module_blob, config.executor))
        if config.router_replay:
            check_replayed(module)
        trains = type(module).on_weights_materialized is not BaseTrainModule.on_weights_materialized
        masters = config.masters if config.masters is not None else trains
        asked = config.bf16 is not None or config.fp16 or config.use_mp_opt
        chosen = precision(
            device.capability,
            str(next(module.parameters()).dtype).removeprefix("torch."),
            bf16=config.bf16,
            fp16=config.fp16,
            in_optimizer=config.use_mp_opt and masters,
        )
        strategy.half = None if chosen.half is None else getattr(torch, chosen.half)
        strategy.shard(module, masters, config.shard_size, config.reshard_after_forward)
        if any(parameter.is_meta for parameter in module.parameters()):
            allocate(module, strategy.weights_device(module))
        self._module = module
        fill = lambda: materialize(module, module.materialization_source(), config.seed)  # noqa: E731
        report(phase="loading the weights")
        source = strategy.control.together("loading the weights", fill)
        strategy.note_weights(module)
        module._rank_context = RankContext(self.rank, self.world_size, device.device, strategy, _stop_requested)
        guard_forward(module)
        report(phase="making the optimizer")
        strategy.control.together("on_weights_materialized", module.on_weights_materialized)
        parts = self._parts = self._parts_of(module, strategy, fill)
        trainer = HeldTrainer(parts)
        policy = Policy(parts, trainer)
        setup = TrainingSetup(parts, trainer)
        made = [trainer, Cells(parts), Keeping(parts), policy, Probes(parts, here), Redefining(parts), setup]
        made += [Snapshots(parts, trainer, policy, setup, _stop_requested), Lending(parts, policy)]
        self._components = {type(component): component for component in made}
        parts.residency.measure()
        quantised = list(quantised_layers(module).values())
        dtype = chosen.dtype(str(next(module.parameters()).dtype).removeprefix("torch."))
        return {
            "architecture": (transformers_class(module) or type(module)).__name__,
            "vocab_size": parts.policy.vocab_size,
            "hidden_size": hidden_size(module),
            "executor": config.executor,
            "parameters": numbers_of(module.parameters()) + sum(math.prod(q.shape) for q in quantised),
            "trainable": numbers_of(p for p in module.parameters() if p.requires_grad),
            "methods": callable_methods(type(module)),
            "adapted": bool(Adapted.of(module)),
            "quantised": quantised[0].kind if quantised else None,
            "dtype": dtype,
            "tied": len(dict(module.named_parameters(remove_duplicate=False))) > len(dict(module.named_parameters())),
            "device": str(device.device),
            "source": source,
            "defaults": [] if asked else [Default("dtype", dtype, chosen.why)],
            "optimizer": [type(optimizer).__name__ for optimizer in optimizers_of(module).values()],
        }

    def _parts_of(self, module: BaseTrainModule, strategy: StrategyBase, fill: Callable[[], str]) -> RankParts:
        device = strategy.device

        def beside() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
            return self._components[HeldTrainer].beside_policy() if self._components else ([], [])

        residency = Residency(module, device, lambda: list(optimizers_of(module).values()), fill, beside)

        def report(**progress: Any) -> None:
            context.current().report(**progress)
            if progress.get("phase") == "backward" and 1 == progress.get("done") < progress.get("total", 1):
                residency.measure()  # gradients are there from the first backward on; after the last one all is counted

        scaling = (lambda: one_optimizer(module)) if self.config.use_mp_opt else (lambda: None)
        return RankParts(
            self.config,
            module,
            strategy,
            self._group,
            residency,
            PolicyStep(module, strategy, _stop_requested, report, scaling, self.config.router_replay),
            WeightSender(module, strategy.control, _stop_requested),
            Namespace(
                module=module, strategy=strategy, rank=self.rank, world_size=self.world_size, device=device.device
            ),
        )

    def close(self) -> None:
        """Free everything and leave the group."""
        if self._parts is not None:
            self._parts.sender.close()
        self._module = self._parts = None
        self._components.clear()
        self._group.close()

    def _built(self) -> RankParts:
        if self._parts is None:
            raise StateError("this train engine is not built; call build() first.")
        return self._parts

    def to_state(self, state: str, tags: list[str] | str | None = None) -> dict[str, Any]:
        """Bring weights and optimizer into a state; see `Residency.move`."""
        parts = self._built()
        result = parts.strategy.control.together(f"{state}()", lambda: parts.residency.move(state, tags))
        parts.residency.measure()
        return dict(result)

    def status(self) -> dict[str, Any]:
        """State of each part. Never blocks."""
        unbuilt = {"built": False, "rank": self.rank, "lr": None, "training": False, "torn": None}
        if self._parts is None:
            return {**unbuilt, "weights": "empty", "optimizer": "empty"}
        module, residency = self._parts.module, self._parts.residency
        groups = [group for optimizer in optimizers_of(module).values() for group in optimizer.param_groups]
        lr = float(groups[0]["lr"]) if groups else None
        torn = {} if residency.torn is None else {"torn": residency.torn, "weights": "torn"}
        return {**unbuilt, "built": True, "lr": lr, "training": module.training, **residency.state, **torn}

    def memory(self) -> dict[str, Any]:
        """Bytes by owner, see `Residency.memory`, and the states. Never blocks."""
        if self._parts is None:
            return {}
        return {**self._parts.residency.memory(), "states": dict(self._parts.residency.state)}

    def release_memory_cache(self, cpu: bool, gpu: bool) -> dict[str, int]:
        """Give back what allocators keep; see `rlbench.weights.memory.release_caches`."""
        parts = self._built()
        freed = release_caches(cpu, gpu)
        parts.residency.measure()
        return freed

    def sync_facts(self) -> Facts:
        """Where this rank is, for the choice of a transport. Never blocks."""
        parts = self._built()
        uuid = facts.gpu_uuid(parts.strategy.device.device)
        address = facts.address() if self._host.startswith("127.") else self._host  # else the user named this node's
        return Facts(facts.node(), address, (uuid,) if uuid else (), channels=parts.sender.channels)

    def stage_weights(self, options: dict[str, Any]) -> Manifest | None:
        """Gather all weights where replicas can read them; `WeightSender.stage`. Only the ranks that write return."""
        return self._weight_sender().stage(**options)

    def release_weights(self) -> None:
        """The replicas have applied: free what was staged on a GPU."""
        self._weight_sender().release_staged()

    def forget_weights(self, prefix: str) -> None:
        """Whoever took what was staged under `prefix` has it: free the memory."""
        self._weight_sender().forget_staged(prefix)

    def weight_layout(self) -> Manifest:
        """What a sync would send, without contents; `WeightSender.layout`."""
        return self._weight_sender().layout()

    def announce_weights(self, options: dict[str, Any]) -> Manifest | None:
        """Say what a broadcast will send; `WeightSender.announce`. Only the sending rank returns."""
        return self._weight_sender().announce(**options)

    def send_weights(self, to: str, manifest: Manifest) -> int:
        """Broadcast all weights to the replicas of engine `to`; `WeightSender.send`."""
        return self._weight_sender().send(to, manifest)

    def give_up_sync(self, to: str, reason: str) -> None:
        """End a broadcast to engine `to` that cannot succeed any more. Never blocks."""
        if self._parts is not None:
            self._parts.sender.give_up(to, reason)

    def state_checksum(self) -> str:
        """sha256 over all full parameters; equal on all ranks."""
        self._weight_sender()
        return checksum(self._built().module)

    def module_source_path(self) -> str | None:
        """Local folder or file the weights come from; None where they come from a dict."""
        source = self._built().module.materialization_source()
        return str(locate(source)) if isinstance(source, str) else None

    def _weight_sender(self) -> WeightSender:
        self._built().residency.need("weights")
        return self._built().sender


if TYPE_CHECKING:  # each has the verbs that drivers ask of it
    _life: type[verbs.LifeVerbs] = TrainRank
    _cells: type[verbs.CellVerbs] = Cells
    _redefining: type[verbs.RedefiningVerbs] = Redefining
    _policy: type[verbs.PolicyVerbs] = Policy
    _probes: type[verbs.ProbeVerbs] = Probes
    _setup: type[verbs.SetupVerbs] = TrainingSetup
    _trainer: type[verbs.TrainerVerbs] = HeldTrainer
    _snapshots: type[verbs.SnapshotVerbs] = Snapshots
    _lending: type[verbs.LendingVerbs] = Lending
    _keeping: type[verbs.KeepingVerbs] = Keeping


def _stop_requested() -> bool:
    return context.current().stop_requested()


def _unpickled(blob: bytes, executor: str) -> BaseTrainModule:
    module = cloudpickle.loads(blob)
    if not isinstance(module, nn.Module) and callable(module):
        module = module()
    check_module(module)
    if not isinstance(module, BaseTrainModule) or isinstance(module, FSDPModule):
        raise BuildError(
            f"{type(module).__name__} does not inherit from a base of rlbench.nn; make it `class "
            f"Mine(rlbench.nn.HuggingFaceFsdp2TrainModule, {type(module).__name__})`."
        )
    executor_for(type(module), executor)
    return module
