"""What a trainer holds beside the policy, so that it goes back with it: kept with a snapshot, put back in place.

Tensors: critic with its optimizer, moving average, gradients that wait for a step. Values: schedulers, the place in the
prompts, the weight of the KL, counts, experience that waits. The reference and reward models never change, so they are
no part of it. What a class of the user's keeps in attributes of its own is, where it defines `get_extra_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rlbench.checkpoint.rank_state import State, like_parameter, under
from rlbench.errors import CheckpointError
from rlbench.strategies.checkpoints import state_of
from rlbench.strategies.surface.memory_side import reshard

if TYPE_CHECKING:
    from rlbench.trainers.ppo.spmd_trainer import SPMDPPOTrainerBase
    from rlbench.trainers.ppo.trainer import PPOTrainer

GRADIENT = "gradient"


def models_beside(trainer: PPOTrainer) -> dict[str, State]:
    """Return the models that change beside the policy, with their optimizers and schedules."""
    states = {}
    if trainer.critic is not None:
        states["critic"] = state_of(trainer.critic, trainer.critic_optim, trainer.critic_scheduler)
    if trainer.ema_model is not None:
        states["average"] = state_of(trainer.ema_model)
    return states


class TrainerState:
    """Of one trainer on one rank; no method holds a collective.

    Args:
        trainer: the rank's.
        id: tells it from every other trainer there was on these ranks.
    """

    def __init__(self, trainer: SPMDPPOTrainerBase, id: str) -> None:
        self._trainer = trainer
        self.id = id

    @property
    def optimizer_steps(self) -> int:
        """Done so far."""
        return self._trainer.optimizer_steps

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors by name, wherever they are now: nothing is brought in for it."""
        tensors: dict[str, Tensor] = {}
        for part, state in self._states().items():
            reshard(state.module)
            tensors |= {f"{part}/{name}": tensor for name, tensor in state.tensors().items()}
        for update in self._trainer.updates:
            if update.holds_gradients:
                for name, parameter in update.model.named_parameters():
                    if parameter.grad is not None:
                        tensors[f"{GRADIENT}/{update.name}/{name}"] = parameter.grad
        return tensors

    def values(self) -> dict[str, Any]:
        """Return the rest, to be pickled: experience holds the user's own prompts and labels."""
        return {
            "where": self._trainer.files.state(),
            "waiting": self._trainer.waiting_state(),
            "parts": {part: state.values() for part, state in self._states().items()},
        }

    def check(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Raise where `load` could not put this back: CheckpointError, DataError, StateError."""
        states, saved = self._states(), values["parts"]
        if states.keys() != saved.keys():
            raise CheckpointError(f"the trainer has {', '.join(states)} now, and had {', '.join(saved)}")
        self._trainer.files.check_fits(values["where"])
        for part, state in states.items():
            state.check(under(part, tensors), saved[part])

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put back what `tensors` and `values` gave, after the policy's own state; models keep their identity.

        The engine's weights are the caller's to bring.
        """
        trainer = self._trainer
        trainer.drop_gradients()
        for part, state in self._states().items():
            reshard(state.module)
            state.load(under(part, tensors), values["parts"][part])
        trainer.files.restore(values["where"])
        for update in trainer.updates:
            parameters = dict(update.model.named_parameters())
            for name, gradient in under(f"{GRADIENT}/{update.name}", tensors).items():
                parameters[name].grad = like_parameter(parameters[name], gradient)
        trainer.restore_waiting(values["waiting"])
        trainer.unsent = False

    def stay(self) -> None:
        """Forget what waits: the policy went elsewhere without the trainer, and it was made with other weights."""
        self._trainer.went_elsewhere()
        self._trainer.unsent = False  # the caller brings the engine's weights

    def _states(self) -> dict[str, State]:
        """Models that change beside the policy, and the policy's schedule."""
        schedule = self._trainer.actor_scheduler
        actor = State(nn.Module(), schedulers={} if schedule is None else {"scheduler": schedule})
        return {"actor": actor, **models_beside(self._trainer)}
