"""What a trainer holds beside the policy, so that it goes back with it: kept with a snapshot, put back in place.

Tensors: critic with its optimizer, moving average, gradients that wait for a step. Values: schedulers, the place in the
prompts, the weight of the KL, counts, experience that waits. The reference and reward models never change, so they are
no part of it. What a class of the user's keeps in attributes of its own is, where it defines `get_extra_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlbench.checkpoint import rank_state
from rlbench.errors import CheckpointError
from rlbench.strategies.memory_side import reshard

if TYPE_CHECKING:
    from rlbench.trainers.spmd_ppo_trainer import SPMDPPOTrainerBase

Part = tuple[nn.Module, dict[str, torch.optim.Optimizer]]
GRADIENT = "gradient"


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
        """This rank's parts by name, wherever they are now: nothing is brought in for it."""
        found: dict[str, Tensor] = {}
        for part, (model, optimizers) in self._parts().items():
            reshard(model)
            found |= {f"{part}/{n}": tensor for n, tensor in rank_state.tensors_of(model, optimizers).items()}
        for update in self._trainer.updates:
            if update.holds_gradients:
                for name, parameter in update.model.named_parameters():
                    if parameter.grad is not None:
                        found[f"{GRADIENT}/{update.name}/{name}"] = rank_state.local_part(parameter.grad)
        return found

    def values(self) -> dict[str, Any]:
        """The rest, to be pickled: experience holds the user's own prompts and labels."""
        return {
            "where": self._trainer.files.state(),
            "waiting": self._trainer.waiting_state(),
            "optimizers": {part: rank_state.optimizer_values(*held) for part, held in self._parts().items()},
            "schedulers": {part: rank_state.scheduler_values(own) for part, own in self._schedulers().items()},
        }

    def check(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Raise where `load` could not put this back: CheckpointError, DataError, StateError."""
        for kind, here in (("optimizers", self._parts()), ("schedulers", self._schedulers())):
            if here.keys() != values[kind].keys():
                raise CheckpointError(
                    f"it has {kind} of {', '.join(here) or 'nothing'} now, and had {', '.join(values[kind]) or 'none'}"
                )
        self._trainer.files.check_fits(values["where"])
        for part, (model, optimizers) in self._parts().items():
            rank_state.check_fits(model, _of(part, tensors), values["optimizers"][part], optimizers)

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put back what `tensors` and `values` gave, after the policy's own state; models keep their identity.

        The engine's weights are the caller's to bring.
        """
        trainer = self._trainer
        trainer.drop_gradients()
        for part, (model, optimizers) in self._parts().items():
            reshard(model)
            rank_state.load_model(model, _of(part, tensors), values["optimizers"][part], optimizers)
        for part, scheduler in self._schedulers().items():
            rank_state.load_scheduler(scheduler, values["schedulers"][part])
        trainer.files.restore(values["where"])
        for update in trainer.updates:
            parameters = dict(update.model.named_parameters())
            for name, gradient in _of(f"{GRADIENT}/{update.name}", tensors).items():
                parameters[name].grad = rank_state.like_parameter(parameters[name], gradient)
        trainer.restore_waiting(values["waiting"])
        trainer.unsent = False

    def stay(self) -> None:
        """The policy went elsewhere without the trainer: what waits was made with other weights, and is forgotten."""
        self._trainer.went_elsewhere()
        self._trainer.unsent = False  # the caller brings the engine's weights

    def _parts(self) -> dict[str, Part]:
        """Models that change beside the policy, with their optimizers."""
        trainer = self._trainer
        parts: dict[str, Part] = {}
        if trainer.critic is not None:
            parts["critic"] = (trainer.critic, {} if trainer.critic_optim is None else {"critic": trainer.critic_optim})
        if trainer.ema_model is not None:
            parts["average"] = (trainer.ema_model, {})
        return parts

    def _schedulers(self) -> dict[str, Any]:
        own = {"actor": self._trainer.actor_scheduler, "critic": self._trainer.critic_scheduler}
        return {name: scheduler for name, scheduler in own.items() if scheduler is not None}


def _of(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(f"{part}/"): tensor for n, tensor in tensors.items() if n.startswith(f"{part}/")}
