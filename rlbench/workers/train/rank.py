"""One training rank: a module, its strategy, and the verbs an engine calls. A plain object; it knows
nothing of Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rlbench.checkpoint import rank_state
from rlbench.data.batches.batch import TrainBatch
from rlbench.dispatch import context
from rlbench.errors import BuildError, EngineError, MethodError, StateError, nearest
from rlbench.nn import BaseTrainModule, RankContext, callable_methods, check_module
from rlbench.nn.base import guard_forward
from rlbench.strategies.fsdp2 import FSDPV2Strategy
from rlbench.strategies.memory.device import RankDevice
from rlbench.strategies.memory.peak import pass_peak
from rlbench.strategies.optim.learning_rate import scaled_rates
from rlbench.strategies.optim.optimizer_set import OptimizerSet, Stepped, parts_of
from rlbench.strategies.ranks.control import issued_collectives
from rlbench.strategies.sharding.materialize import allocate, materialize
from rlbench.strategies.sharding.sources import locate
from rlbench.strategies.surface.memory_side import reshard
from rlbench.trainers.update.options import PolicyOptions
from rlbench.trainers.update.policy_step import PolicyStep
from rlbench.weights import facts
from rlbench.weights.manifest import Manifest
from rlbench.weights.memory import release_caches
from rlbench.weights.names import transformers_class
from rlbench.weights.transport import Facts
from rlbench.workers.train.cells import CellVerbs
from rlbench.workers.train.config import TrainConfig
from rlbench.workers.train.gradients import GradientProbe
from rlbench.workers.train.group import RankGroup
from rlbench.workers.train.keeping import Keeping
from rlbench.workers.train.namespace import Namespace
from rlbench.workers.train.optimizers import outside_state, unstepped
from rlbench.workers.train.parts import RankParts, verbs_of
from rlbench.workers.train.redefine import RedefineVerbs
from rlbench.workers.train.stage import WeightSender, checksum
from rlbench.workers.train.states import Residency
from rlbench.workers.train.trainer import TrainerVerbs
from rlbench.workers.train.trial import PolicyTrial

OF_THE_STRATEGY = ("adam_offload", "use_mp_opt", "fsdp_cpu_offload")
FORWARD_INSTEAD_OF_CALL = "got mixed torch.Tensor and DTensor"


class TrainRank(RedefineVerbs, CellVerbs, TrainerVerbs):
    """Built in two calls: `rendezvous` on rank 0, then `build` on all ranks at once.

    Every verb but those of `CONTROL`, `rendezvous` and `register` is collective and runs on one compute thread. A verb
    is a method here, or of the component that `VERBS` names.
    """

    VERBS = verbs_of([Keeping])
    CONTROL = frozenset({"status", "memory", "sync_facts", "give_up_sync", "complete_names"})

    def __init__(self, rank: int, world_size: int, config: TrainConfig) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = config
        named = facts.INTERFACE in os.environ and config.host == facts.LOOPBACK
        self._host = facts.address() if named else config.host
        self._group = RankGroup(rank, world_size, self._host, config.timeout_s)
        self._module: BaseTrainModule | None = None
        self._sender: WeightSender | None = None
        self._methods: frozenset[str] = frozenset()
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
            self._components[Keeping].begins(verb)

    # -- life ------------------------------------------------------------------------------------------------

    def rendezvous(self) -> tuple[str, int] | None:
        """Start the store on rank 0 and return its address; None on the others."""
        return self._group.serve()

    def register(self, epoch: int, seq: int, timeout_s: float) -> bool:
        """Agree with all ranks that they have call (epoch, seq); False on all if one has not in time."""
        agreed = self._group.register(epoch, seq, timeout_s)
        if agreed and self._group.take_failure():
            reshard(self._built())  # a rank that failed holds no gathered parameter any more, so nobody may
        return agreed

    def issued_collectives(self) -> int:
        """How many collectives this rank has issued: one that waits for a peer has issued more than that. Never
        blocks."""
        return issued_collectives()

    def build(self, module_blob: bytes, master: tuple[str, int]) -> dict[str, Any]:
        """Join the ranks, make the module, shard it, load its weights, run its hook; collective.

        Args:
            module_blob: by cloudpickle: a module on meta, or a callable that makes one on the rank.
            master: what rank 0's `rendezvous` returned.

        Returns:
            `architecture`, `vocab_size`, `parameters`, `trainable`, `methods`, `dtype` (of computation), `tied`,
            `device`, `source`, `optimizer`.

        Raises:
            BuildError: on every rank, when one cannot make or fill its module.
        """
        if self._module is not None:
            raise BuildError("this train engine is built already; close() it, or make another one.")
        torch.set_num_threads(self._threads())
        report = context.current().report
        device = RankDevice.pick(self.rank, self.config.device)
        report(phase="joining the ranks")
        self._group.join(master, device)
        report(phase="making the module")
        self._strategy = strategy = self._make_strategy(device)
        strategy.set_seed()
        module = strategy.control.together("making the module", lambda: _unpickled(module_blob))
        methods = callable_methods(type(module))
        trains = type(module).on_weights_materialized is not BaseTrainModule.on_weights_materialized
        masters = self.config.masters if self.config.masters is not None else trains
        if self.config.bf16 is None:
            half = self.config.use_mp_opt and masters
            strategy.bf16 = half or device.is_gpu or next(module.parameters()).dtype == torch.bfloat16
        strategy.shard(module, masters, self.config.shard_size, self.config.reshard_after_forward)
        allocate(module, strategy.weights_device(module))
        self._module = module
        report(phase="loading the weights")
        self._source = strategy.control.together("loading the weights", self._materialize)
        stop = lambda: context.current().stop_requested()  # noqa: E731
        module._rank_context = RankContext(self.rank, self.world_size, device.device, strategy, stop)
        guard_forward(module)
        report(phase="making the optimizer")
        strategy.control.together("on_weights_materialized", module.on_weights_materialized)
        self._residency = Residency(module, device, self._optimizers, self._materialize, self._beside)
        self._policy = PolicyStep(module, strategy, stop, self._report, self._scaling_optimizer)
        self._gradients = GradientProbe(module, self._policy, self._residency)
        here = self.config.local_ranks or self.world_size
        self._trial = PolicyTrial(module, self._policy, self._residency, strategy, self._optimizers, here)
        self._sender = WeightSender(module, strategy.control, stop)
        parts = RankParts(self.config, module, strategy, self._residency, self._policy, self._sender)
        self._components = {Keeping: Keeping(parts, self._trainer_state, stop)}
        uuid = facts.gpu_uuid(device.device)
        near = self._host.startswith("127.")  # else the user named the address of this node
        self._facts = Facts(facts.node(), facts.address() if near else self._host, (uuid,) if uuid else ())
        self._namespace = Namespace(
            module=module, strategy=strategy, rank=self.rank, world_size=self.world_size, device=device.device
        )
        self._methods = frozenset(info["name"] for info in methods)
        self._remeasure()
        return {
            "architecture": (transformers_class(module) or type(module)).__name__,
            "vocab_size": self._policy.vocab_size,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "trainable": sum(p.numel() for p in module.parameters() if p.requires_grad),
            "methods": methods,
            "dtype": self._compute_dtype(),
            "tied": len(dict(module.named_parameters(remove_duplicate=False))) > len(dict(module.named_parameters())),
            "device": str(device.device),
            "source": self._source,
            "optimizer": [type(optimizer).__name__ for optimizer in self._optimizers()],
        }

    def close(self) -> None:
        """Free everything and leave the group."""
        if self._sender is not None:
            self._sender.close()
        self._module = self._sender = None
        self._components.clear()
        self._methods = frozenset()
        self._group.close()

    # -- the user's code -------------------------------------------------------------------------------------

    def call_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of the user's module. A result that is the module itself (`train()`) becomes None."""
        module = self._built()
        if name not in self._methods:
            raise MethodError(f"the module has no method {name!r}{nearest(name, self._methods)}.")
        self._residency.need("weights")
        try:
            result = self.in_namespace(lambda: getattr(module, name)(*args, **kwargs))
        except RuntimeError as error:
            if FORWARD_INSTEAD_OF_CALL in str(error):
                raise EngineError(
                    f"{name} used a submodule or parameter whose shards are not gathered ({error}); go "
                    "through self(...), not self.forward(...) or a part of the model."
                ) from error
            raise
        return None if result is module else result

    def run(self, fn_blob: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function (or, as a string, a cell) in the rank's namespace; see `Namespace.run`."""
        return self.in_namespace(lambda: self._namespace.run(cloudpickle.loads(fn_blob), args, kwargs))

    def in_namespace(self, work: Callable[[], Any]) -> Any:
        """Do what a user wrote: whatever ends it early, no gathered parameter is left behind, on any rank."""
        module = self._built()
        try:
            return work()
        except BaseException:
            reshard(module)
            self._group.failed = True
            raise
        finally:
            self._remeasure()

    # -- policy ----------------------------------------------------------------------------------------------

    def policy_forward(self, batch: TrainBatch, options: PolicyOptions | Mapping[str, Any]) -> dict[str, Any]:
        """Log-probs and entropies without gradient, of this rank's rows; see `PolicyStep.forward`."""
        self._built()
        self._residency.need("weights")
        with self._residency.passing():
            return self._policy.forward(batch, PolicyOptions.of(options))

    def policy_forward_backward(
        self, batch: TrainBatch, loss_blob: bytes, options: PolicyOptions | Mapping[str, Any]
    ) -> dict[str, Any]:
        """Add the gradients of a batch; see `PolicyStep.forward_backward`."""
        self._built()
        self._residency.need("weights")
        self.need_no_trainer_gradients()
        try:
            with self._residency.passing(), pass_peak(self._strategy.device.device) as peak:
                done = self._policy.forward_backward(batch, loss_blob, PolicyOptions.of(options))
            return done | {"peak_bytes": peak.bytes}
        finally:
            self._remeasure()

    def policy_optim_step(self, options: dict[str, Any]) -> dict[str, Any]:
        """One optimizer step; options: `lr` and `max_norm` (of this step alone), `whole_step`. See
        `PolicyStep.optim_step`."""
        module = self._built()
        self._residency.need("weights", "optimizer")
        self.need_no_trainer_gradients()
        unknown = sorted(set(options) - {"lr", "max_norm", "whole_step"})
        if unknown:
            raise EngineError(f"unknown option {unknown[0]!r}; optim_step takes lr and max_norm.")
        optimizer, lr = self._policy_optimizer(), options.get("lr")
        self._strategy.maybe_load_optimizer(optimizer)  # a trainer that a cell drives leaves it away
        notes = [unstepped(module, optimizer)]
        try:
            done = self._policy.optim_step(
                optimizer,
                getattr(module, "lr_scheduler", None),
                options.get("max_norm"),
                options.get("whole_step", False),
                None if lr is None else scaled_rates(optimizer, lr),
            )
            notes.append(outside_state(module, optimizer))
            return done | {"notes": [note for note in notes if note is not None]}
        finally:
            self._remeasure()

    def policy_zero_grad(self) -> None:
        """Forget the gradients that wait for a step."""
        self._built()
        self._policy.zero_grad()
        self.drop_trainer_gradients()
        self._remeasure()

    def gradient_facts(self) -> dict[str, Any]:
        """What the gradients that wait are like; see `GradientProbe.facts`."""
        self._built()
        return self._gradients.facts()

    def gradients_of_losses(
        self, batch: TrainBatch, losses: dict[str, tuple[bytes, Any]], options: PolicyOptions | Mapping[str, Any]
    ) -> dict[str, Any]:
        """The whole gradients of several losses; see `GradientProbe.of_losses`."""
        self._built()
        return self._gradients.of_losses(batch, losses, options)

    def policy_trial(
        self, batch: TrainBatch, options: dict[str, Any], loss_blob: bytes | None = None
    ) -> dict[str, Any]:
        """A pass with everything put back; see `PolicyTrial.run`."""
        self._built()
        return self._trial.run(batch, options, loss_blob)

    def trial_facts(self, batch: TrainBatch, options: dict[str, Any]) -> dict[str, Any]:
        """What a rehearsal plans with; see `PolicyTrial.facts`."""
        self._built()
        return self._trial.facts(batch, options)

    def rehearse(
        self, warm_up: TrainBatch, batch: TrainBatch, options: dict[str, Any], loss_blob: bytes | None
    ) -> dict[str, Any]:
        """One micro-batch at its worst, measured; see `PolicyTrial.rehearse`."""
        self._built()
        return self._trial.rehearse(warm_up, batch, options, loss_blob)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the policy's optimizer, and the base rate of its schedulers; a trainer's is at this
        rate now and goes on from it in proportion (see `go_on_from`, which may refuse).

        Where its groups have rates of their own the first gets `lr`, and the others keep their ratio to it.
        """
        module, optimizer = self._built(), self._policy_optimizer()
        rates = scaled_rates(optimizer, lr)
        if not any(rates) and len({group["lr"] for group in optimizer.param_groups}) > 1:
            raise EngineError("lr=0 would forget the ratio of the groups' rates; train_step(…, lr=0) is for one step.")
        self._schedule_from(rates)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            if "initial_lr" in group:
                group["initial_lr"] = rate
        stepped = parts_of(optimizer)
        for scheduler in rank_state.schedulers_of(module).values():
            if any(scheduler.optimizer is part for part in stepped):
                scheduler.base_lrs = [float(group["lr"]) for group in scheduler.optimizer.param_groups]

    # -- weights ---------------------------------------------------------------------------------------------

    def sync_facts(self) -> Facts:
        """Where this rank is, for the choice of a transport. Never blocks."""
        channels = self._sender.channels if self._sender is not None else ()
        return replace(self._facts, channels=channels)

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

    def send_weights(self, to: str, manifest: Manifest) -> None:
        """Broadcast all weights to the replicas of engine `to`; `WeightSender.send`."""
        self._weight_sender().send(to, manifest)

    def give_up_sync(self, to: str, reason: str) -> None:
        """End a broadcast to engine `to` that cannot succeed any more. Never blocks."""
        if self._sender is not None:
            self._sender.give_up(to, reason)

    def _weight_sender(self) -> WeightSender:
        self._built()
        self._residency.need("weights")
        assert self._sender is not None
        return self._sender

    def state_checksum(self) -> str:
        """sha256 over all full parameters; equal on all ranks."""
        module = self._built()
        self._residency.need("weights")
        return checksum(module)

    def module_source_path(self) -> str | None:
        """Local folder or file the weights come from; None where they come from a dict."""
        source = self._built().materialization_source()
        return str(locate(source)) if isinstance(source, str) else None

    # -- states ----------------------------------------------------------------------------------------------

    def to_state(self, state: str, tags: list[str] | str | None = None) -> dict[str, Any]:
        """Bring weights and optimizer into a state; see `Residency.move`."""
        self._built()
        result = self._strategy.control.together(f"{state}()", lambda: self._residency.move(state, tags))
        self._remeasure()
        return dict(result)

    def status(self) -> dict[str, Any]:
        """State of each part. Never blocks."""
        built = self._module is not None and bool(self._methods)
        parts = dict(self._residency.state) if built else {"weights": "empty", "optimizer": "empty"}
        torn = self._residency.torn if built else None
        if torn is not None:
            parts["weights"] = "torn"
        optimizers = self._optimizers() if built else []
        lr = float(optimizers[0].param_groups[0]["lr"]) if optimizers else None
        training = self._module is not None and self._module.training
        return {"built": built, "rank": self.rank, "lr": lr, "training": training, "torn": torn, **parts}

    def memory(self) -> dict[str, Any]:
        """Bytes by owner, see `Residency.memory`, and the states. Never blocks."""
        if self._module is None or not self._methods:
            return {}
        return {**self._residency.memory(), "states": dict(self._residency.state)}

    def release_memory_cache(self, cpu: bool, gpu: bool) -> dict[str, int]:
        """Give back what allocators keep; see `rlbench.weights.memory.release_caches`."""
        self._built()
        freed = release_caches(cpu, gpu)
        self._remeasure()
        return freed

    # -- parts -----------------------------------------------------------------------------------------------

    def _make_strategy(self, device: RankDevice) -> FSDPV2Strategy:
        config = self.config
        return FSDPV2Strategy(
            seed=config.seed,
            max_norm=config.max_norm,
            micro_train_batch_size=config.micro_train_batch_size,
            train_batch_size=config.train_batch_size,
            bf16=bool(config.bf16),
            args={name: getattr(config, name) for name in OF_THE_STRATEGY},
            device=device,
        )

    def _threads(self) -> int:
        """Threads of this rank: its share of the cores it may run on."""
        if self.config.threads is not None:
            return self.config.threads
        return max(1, len(os.sched_getaffinity(0)) // (self.config.local_ranks or self.world_size))

    def _built(self) -> BaseTrainModule:
        if self._module is None or not self._methods:
            raise StateError("this train engine is not built; call build() first.")
        return self._module

    def _materialize(self) -> str:
        assert self._module is not None
        return materialize(self._module, self._module.materialization_source(), self.config.seed)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers the module holds."""
        assert self._module is not None
        return list(rank_state.optimizers_of(self._module).values())

    def _policy_optimizer(self) -> Stepped:
        """`module.optimizer`, one or a dict of several; or the only one."""
        named = vars(self._built()).get("optimizer")
        if isinstance(named, torch.optim.Optimizer):
            return named
        if isinstance(named, Mapping) and named:
            return OptimizerSet(named)
        optimizers = self._optimizers()
        if len(optimizers) != 1:
            raise EngineError(
                f"the module has {len(optimizers)} optimizers and none is called self.optimizer; create it "
                "in on_weights_materialized: self.optimizer = self.strategy.create_optimizer(self, lr=…), or a dict of "
                "several, which are stepped together."
            )
        return optimizers[0]

    def _one_optimizer(self) -> torch.optim.Optimizer:
        """`_policy_optimizer()` for who steps one alone."""
        optimizer = self._policy_optimizer()
        if isinstance(optimizer, OptimizerSet):
            raise EngineError(
                f"module.optimizer is a set of {len(optimizer.parts)}, and a trainer (and use_mp_opt) steps one: hold "
                "one that is made of them, or step with session.train_step."
            )
        return optimizer

    def _scaling_optimizer(self) -> torch.optim.Optimizer | None:
        """That of the policy verbs where it has a say in a backward (`use_mp_opt`)."""
        return self._one_optimizer() if self.config.use_mp_opt else None

    def _compute_dtype(self) -> str:
        assert self._module is not None
        dtype = torch.bfloat16 if self._strategy.bf16 else next(self._module.parameters()).dtype
        return str(dtype).removeprefix("torch.")

    def _report(self, **progress: Any) -> None:
        """Publish how far a pass is. Gradients are there from the first backward on: count them then."""
        context.current().report(**progress)
        if progress.get("phase") == "backward" and progress.get("done") == 1:
            self._remeasure()

    def _remeasure(self) -> None:
        self._residency.measure()


def _unpickled(blob: bytes) -> BaseTrainModule:
    """Rebuild the module, on meta, as one of our bases."""
    module = cloudpickle.loads(blob)
    if not isinstance(module, nn.Module) and callable(module):
        module = module()
    check_module(module)
    if not isinstance(module, BaseTrainModule) or isinstance(module, FSDPModule):
        raise BuildError(
            f"{type(module).__name__} does not inherit from a base of rlbench.nn; make it `class "
            f"Mine(rlbench.nn.HuggingFaceFsdp2TrainModule, {type(module).__name__})`."
        )
    return module
