"""The component of a rank that holds a trainer for `session.trainer`."""

from __future__ import annotations

import operator
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import torch
from torch import nn

from rlbench.dispatch import context
from rlbench.errors import EngineError, StateError, Stopped, nearest
from rlbench.strategies.generation.engine import EngineStatus
from rlbench.trainers.ppo.state import TrainerState
from rlbench.workers.train.optimizers import one_optimizer
from rlbench.workers.train.parts import RankParts

VERBS = {
    "make_experience": "make_experience",
    "ppo_train": "train_on_waiting",
    "iterate": "iterate",
    "evaluate": "evaluate",
    "save": "files.save",
    "load": "files.load",
    "where": "files.place",
    "finish": "finish",
    "sync": "send_weights",
}
"""What `call_trainer` calls by each name, as an attribute of the trainer."""
TAKES_GRADIENTS = dict.fromkeys(("ppo_train", "iterate"), "the trainer's would take them in")
TAKES_GRADIENTS |= {"load": "load would drop them"}
NAME = "trainer"


class HeldTrainer:
    """Verbs of a built rank. The trainer is `trainer` in the namespace of `train.run` and `%%ranks`; what a cell makes
    under that name is the cell's, and the session's trainer stays."""

    def __init__(self, parts: RankParts) -> None:
        self._parts, self._strategy, self._names = parts, parts.strategy, parts.namespace.names
        self._trainer: Any = None
        self._id = ""
        self._made: dict[str, Any] = {}
        self._spec: bytes | None = None  # on rank 0: what a session that is parked makes it again from
        self._owes_wake = self._left_loaded = False

    def make_trainer(self, method: str, spec_blob: bytes, id_: str | None = None) -> dict[str, Any]:
        """Build the trainer of a `TrainerSpec` around the rank's module, in the place of the one there is, which stays
        as it was where the new one is refused; collective. `id_`: that of the same trainer on ranks that died, whose
        snapshots it goes back to."""
        from rlbench.trainers.options.specs import TextSpec
        from rlbench.trainers.ppo.building import build_trainer, put_aside
        from rlbench.trainers.texts.building import build_text_trainer

        parts = self._parts
        parts.residency.need("weights", "optimizer", whole=False)  # of one that a heal has yet to bring back, too
        spec = self._strategy.control.together("reading the trainer", lambda: cloudpickle.loads(spec_blob))
        id_ = id_ or self._strategy.control.gather(secrets.token_hex(4))[0]

        def build() -> Any:
            optimizer, half, loaded = one_optimizer(parts.module), self._strategy.half, self._note_loaded
            if isinstance(spec, TextSpec):
                return build_text_trainer(parts.module, optimizer, spec, half, loaded)
            return build_trainer(parts.module, optimizer, spec, half, loaded, parts.config.router_replay)

        with put_aside(self._trainer):
            trainer = parts.of_the_user(build)
        self.drop_trainer()
        self._trainer = self._names[NAME] = trainer
        self._id, self._spec = id_, spec_blob if self._strategy.control.rank == 0 else None
        self._made = {
            "id": id_,
            "method": method,
            "options": trainer.options.told(),
            "aggregation": trainer.aggregation.mode,
            "samples": trainer.samples,
            "texts": None if trainer.samples else len(trainer.texts),
        }
        return self._as_it_is()

    def _note_loaded(self) -> None:
        """A trainer was refused after a checkpoint was loaded: the one before goes on from weights that are not its."""
        self._left_loaded = True
        if self._trainer is not None:
            self._trainer.went_elsewhere()

    def take_left_loaded(self) -> bool:
        """Whether a trainer was refused after a checkpoint was loaded into the policy, since this was asked last."""
        loaded, self._left_loaded = self._left_loaded, False
        return loaded

    def held_trainer(self) -> dict[str, Any] | None:
        """Return what `make_trainer` returned, as it is now; `unsent`: the replicas have older weights; `experience`:
        some waits."""
        return None if self._trainer is None else self._as_it_is()

    def _as_it_is(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            **self._made,
            "optimizer_steps": trainer.optimizer_steps,
            "unsent": bool(trainer.unsent),
            "experience": trainer.experience_waits,
        }

    def trained_on(self) -> Any:
        """Return some of the sequences that the last iteration trained on, as a batch; None before the first."""
        return None if self._trainer is None else self._trainer.shown

    def held_beside(self) -> dict[str, Any]:
        """Return what a checkpoint of the policy leaves out: whether `gradients` wait that no trainer holds, and of the
        trainer what `make_trainer` takes."""
        trainer = self._trainer
        waiting = self._parts.policy.waiting and not self._holds_gradients
        made = None if trainer is None else {"method": self._made["method"], "spec": self._spec, "id": self._id}
        return {"gradients": waiting, "trainer": made}

    def call_trainer(self, verb: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run a verb of the trainer, which uses engine and optimizer; between calls they are where the kernel left
        them."""
        trainer, module = self._trainer, self._parts.module
        if trainer is None:
            raise StateError("there is no trainer on the ranks: session.trainer(…) makes one")
        if verb not in VERBS:
            raise EngineError(f"the trainer has no verb {verb!r}{nearest(verb, VERBS)}")
        method = operator.attrgetter(VERBS[verb])(trainer)
        if verb == "where":  # asks nobody
            return method()
        self._parts.residency.need("weights", "optimizer")
        if verb in TAKES_GRADIENTS and self._parts.policy.waiting and not self._holds_gradients:
            raise StateError(
                f"gradients of forward_backward wait for a step, and {TAKES_GRADIENTS[verb]}: session.optim_step() or "
                "session.zero_grad() first"
            )
        was_awake = trainer.samples and self._replicas_awake()
        optimizer = one_optimizer(module)
        context.current().report(phase=verb)
        trainer.strategy.maybe_offload_optimizer(optimizer)
        try:
            with self._parts.residency.passing():
                return self._parts.of_the_user(lambda: method(*args, **(kwargs or {})))
        finally:
            trainer.strategy.maybe_load_optimizer(optimizer)
            self._owes_wake = was_awake
            error = sys.exc_info()[1]
            if error is None or isinstance(error, Stopped):  # so it ended on all ranks
                self.wake_as_before()

    def _replicas_awake(self) -> bool:
        strategy = self._trainer.strategy
        status = strategy.control.together("asking the engine", lambda: strategy.inference_engine_status)
        return all(one is EngineStatus.WAKEUP for one in strategy.control.gather(status))

    def wake_as_before(self) -> None:
        """Wake the replicas if they were awake before the last verb; collective. After an error the kernel calls it."""
        if self._trainer is not None and self._owes_wake:
            self._owes_wake = False
            self._trainer.strategy.wakeup_inference_engine()

    def drop_trainer(self) -> None:
        """Forget the trainer and free what it holds beside the actor."""
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        if self._names.get(NAME) is trainer:
            del self._names[NAME]
        update = getattr(trainer, "policy_update", None)
        if update is not None and update.waiting:
            update.clear()  # they lie on the actor, which stays
        del trainer, update
        self._strategy.sync_and_clear_cache()

    def need_no_trainer_gradients(self) -> None:
        """Refuse a verb of the session that would take in gradients of the trainer's which wait for their step."""
        trainer = self._trainer
        if trainer is None or trainer.policy_update is None:
            return
        if trainer.policy_update.lost_gradients:  # a cell cleared them: what comes now is not to be taken for them
            trainer.drop_gradients()
        if trainer.policy_update.holds_gradients:
            waiting, whole = trainer.sequences_waiting
            raise StateError(
                f"gradients of the trainer wait for their step ({waiting} of its {whole} sequences on each rank), and "
                "this would take them in: trainer.step() goes on with them, session.zero_grad() drops them"
            )

    def drop_trainer_gradients(self) -> None:
        """Drop the trainer's that wait as the policy's were cleared, the critic's too."""
        update = None if self._trainer is None else self._trainer.policy_update
        if update is not None and update.waiting:
            self._trainer.drop_gradients()

    @property
    def _holds_gradients(self) -> bool:
        """Whether gradients of the trainer's wait for the rest of their step; of a trainer of texts none do."""
        update = None if self._trainer is None else self._trainer.policy_update
        return update is not None and update.holds_gradients

    def schedule_from(self, rates: Sequence[float]) -> None:
        """Let a schedule of the trainer's go on from the rates that the policy's groups have from now on."""
        from rlbench.trainers.ppo.building import go_on_from

        if self._trainer is not None and self._trainer.actor_scheduler is not None:
            go_on_from(self._trainer.actor_scheduler, rates)

    def trainer_state(self) -> TrainerState | None:
        """What the trainer holds beside the policy; None without one."""
        return None if self._trainer is None else TrainerState(self._trainer, self._id)

    def beside_policy(self) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        """The models and optimizers that the trainer holds beside the policy's."""
        held = [] if self._trainer is None else list(vars(self._trainer).values())
        models = [one for one in held if isinstance(one, nn.Module) and one is not self._parts.module]
        return models, [one for one in held if isinstance(one, torch.optim.Optimizer)]
