"""The verbs of a rank that hold a trainer for `session.trainer`."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
import torch
from torch import nn

from rlbench.dispatch import context
from rlbench.errors import EngineError, StateError, Stopped, nearest
from rlbench.trainers.ppo.state import TrainerState

if TYPE_CHECKING:
    from rlbench.workers.train.rank import TrainRank

VERBS = ("make_experience", "ppo_train", "iterate", "evaluate", "save", "load", "where", "finish", "sync")
STEPPING = ("ppo_train", "iterate")
NAME = "trainer"


class TrainerVerbs:
    """What `TrainRank` inherits: make_trainer, held_trainer, call_trainer, drop_trainer.

    The trainer is `trainer` in the namespace of `train.run` and `%%ranks`, to be looked at and changed there; what a
    cell makes under that name is the cell's, and the session's trainer stays.
    """

    _trainer: Any = None
    _trainer_id: str = ""
    _made_trainer: dict[str, Any] | None = None
    _owes_wake: bool = False
    _left_loaded: bool = False

    def make_trainer(self, method: str, spec_blob: bytes, id_: str | None = None) -> dict[str, Any]:
        """Build the trainer of a `TrainerSpec` around the rank's module; collective. Replaces the one there is.

        That stays as it was where the new one is refused. Its models keep to host memory meanwhile.

        Args:
            method: what its maker calls it.
            spec_blob: the `TrainerSpec`, by cloudpickle.
            id_: that of the same trainer on ranks that died, whose snapshots it goes back to; None: one of its own.

        Returns:
            `id` and `method`; `overridden`: options of the strategy that are not at their default; `ppo`: all of the
            trainer; `aggregation`: its mode; `optimizer_steps`: done before, by the run whose checkpoint was loaded.
        """
        from rlbench.trainers.ppo.building import build_trainer, put_aside

        me = cast("TrainRank", self)
        module = me._built()
        me._residency.need("weights", "optimizer", whole=False)  # of one that a heal has yet to bring back, too
        spec = me._strategy.control.together("reading the trainer", lambda: cloudpickle.loads(spec_blob))
        id_ = id_ or me._strategy.control.gather(secrets.token_hex(4))[0]
        with put_aside(self._trainer):
            made = me.in_namespace(
                lambda: build_trainer(module, me._one_optimizer(), spec, me._strategy.bf16, self._note_loaded)
            )
        self.drop_trainer()
        self._trainer = me._namespace.names[NAME] = made
        self._trainer_id = id_
        config = made.options.strategy
        changed = {name: getattr(config, name) for name in config.overridden()}
        self._made_trainer = {
            "id": id_,
            "method": method,
            "overridden": changed,
            "ppo": vars(made.options.ppo),
            "aggregation": made.aggregation.mode,
        }
        return {**self._made_trainer, "optimizer_steps": made.optimizer_steps}

    def _note_loaded(self) -> None:
        """A trainer was refused after a checkpoint was loaded: the one before goes on from weights that are not its."""
        self._left_loaded = True
        if self._trainer is not None:
            self._trainer.went_elsewhere()

    def take_left_loaded(self) -> bool:
        """Whether a trainer was refused after a checkpoint was loaded into the policy, since this was asked last."""
        found, self._left_loaded = self._left_loaded, False
        return found

    def held_trainer(self) -> dict[str, Any] | None:
        """What `make_trainer` returned, as it is now, for a kernel that came later; None without a trainer.

        Also `unsent`: the policy has changed since the replicas got it; `experience`: some waits to be trained on.
        """
        trainer = self._trainer
        if trainer is None or self._made_trainer is None:
            return None
        return {
            **self._made_trainer,
            "optimizer_steps": trainer.optimizer_steps,
            "unsent": bool(trainer.unsent),
            "experience": len(trainer.replay_buffer) > 0,
        }

    def call_trainer(self, verb: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run a verb of the trainer; collective.

        Between calls engine and optimizer are where the kernel left them: it uses both.
        """
        me = cast("TrainRank", self)
        me._built()
        trainer = self._trainer
        if trainer is None:
            raise StateError("there is no trainer on the ranks: session.trainer(…) makes one")
        if verb not in VERBS:
            raise EngineError(f"the trainer has no verb {verb!r}{nearest(verb, VERBS)}")
        if verb == "where":  # asks nobody
            return trainer.files.place()
        me._residency.need("weights", "optimizer")
        if verb in (*STEPPING, "load") and me._policy.waiting and not trainer.policy_update.holds_gradients:
            would = "load would drop them" if verb == "load" else "the trainer's would take them in"
            raise StateError(
                f"gradients of forward_backward wait for a step, and {would}: session.optim_step() or "
                "session.zero_grad() first"
            )
        was_awake = self._engine_awake(trainer)
        optimizer = me._one_optimizer()
        calls = {
            "save": trainer.files.save,
            "load": trainer.files.load,
            "finish": trainer.finish,
            "ppo_train": trainer.train_on_waiting,
            "sync": trainer.send_weights,
        }
        method = calls.get(verb) or getattr(trainer, verb)
        context.current().report(phase=verb)
        trainer.strategy.maybe_offload_optimizer(optimizer)
        try:
            with me._residency.passing():
                return me.in_namespace(lambda: method(*args, **(kwargs or {})))
        finally:
            trainer.strategy.maybe_load_optimizer(optimizer)
            self._owes_wake = was_awake
            if self._ended_alike():
                self.wake_as_before()

    def need_no_trainer_gradients(self) -> None:
        """Refuse a verb of the session that would take in gradients of the trainer's which wait for their step.

        Raises:
            StateError: naming what waits, and the calls that end it.
        """
        trainer = self._trainer
        if trainer is None:
            return
        if trainer.policy_update.lost_gradients:  # a cell cleared them: what comes now is not to be taken for them
            trainer.drop_gradients()
        if trainer.policy_update.holds_gradients:
            waiting, whole = trainer.sequences_waiting
            raise StateError(
                f"gradients of the trainer wait for their step ({waiting} of its {whole} sequences on each rank), and "
                "this would take them in: trainer.step() goes on with them, session.zero_grad() drops them"
            )

    def _schedule_from(self, rates: Sequence[float]) -> None:
        """Let a schedule of the trainer's go on from the rates that the policy's groups have from now on."""
        from rlbench.trainers.ppo.building import go_on_from

        if self._trainer is not None and self._trainer.actor_scheduler is not None:
            go_on_from(self._trainer.actor_scheduler, rates)

    def drop_trainer_gradients(self) -> None:
        """The policy's gradients were cleared: those of the trainer's that wait go with them, the critic's too."""
        if self._trainer is not None and self._trainer.policy_update.waiting:
            self._trainer.drop_gradients()

    def _trainer_state(self) -> TrainerState | None:
        """What the trainer holds beside the policy; None without one."""
        return None if self._trainer is None else TrainerState(self._trainer, self._trainer_id)

    def _beside(self) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        """The models and optimizers that the trainer holds beside the policy's."""
        held = [] if self._trainer is None else list(vars(self._trainer).values())
        mine = cast("TrainRank", self)._module
        models = [one for one in held if isinstance(one, nn.Module) and one is not mine]
        return models, [one for one in held if isinstance(one, torch.optim.Optimizer)]

    def wake_as_before(self) -> None:
        """Make the replicas able to generate if they were before the verb that ended last; collective.

        After an error the kernel calls it, which has heard from all ranks that they have ended.
        """
        if self._trainer is not None and self._owes_wake:
            self._owes_wake = False
            self._trainer.strategy.wakeup_inference_engine()

    def _engine_awake(self, trainer: Any) -> bool:
        from rlbench.strategies.generation.engine import EngineStatus

        strategy = trainer.strategy
        own = strategy.control.together("asking the engine", lambda: strategy.inference_engine_status)
        return all(status is EngineStatus.WAKEUP for status in strategy.control.gather(own))

    def _ended_alike(self) -> bool:
        """Whether what just ended, ended on all ranks: with a value, or by a stop, which they agree on."""
        error = sys.exc_info()[1]
        return error is None or isinstance(error, Stopped)

    def drop_trainer(self) -> None:
        """Forget the trainer and free what it holds beside the actor."""
        me = cast("TrainRank", self)
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        if me._namespace.names.get(NAME) is trainer:
            del me._namespace.names[NAME]
        if getattr(trainer, "policy_update", None) is not None and trainer.policy_update.waiting:
            trainer.policy_update.clear()  # they lie on the actor, which stays
        del trainer
        me._strategy.sync_and_clear_cache()
