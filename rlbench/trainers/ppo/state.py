"""What a trainer keeps: checkpoints to go on from, and beside the policy what goes back with a snapshot of it.

Reference and reward models never change, so they are no part of it. What a class of the user's keeps in attributes of
its own is, where it defines `get_extra_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rlbench.checkpoint.rank_state import State, like_parameter, under
from rlbench.errors import CheckpointError, StateError
from rlbench.strategies.checkpoints import MODEL
from rlbench.strategies.memory.offloading import reshard

if TYPE_CHECKING:
    from rlbench.trainers.ppo.spmd_trainer import SPMDPPOTrainerBase
    from rlbench.trainers.ppo.trainer import PPOTrainer

GRADIENT = "gradient"


def models_beside(trainer: PPOTrainer) -> dict[str, State]:
    """Return the models that change beside the policy, with their optimizers and schedules."""
    states, state_of = {}, trainer.strategy.state_of
    if trainer.critic is not None:
        states["critic"] = state_of(trainer.critic, trainer.critic_optim, trainer.critic_scheduler)
    if trainer.ema_model is not None:
        states["average"] = state_of(trainer.ema_model)
    return states


class TrainerCheckpoints:
    """Saves and loads one trainer; every method is collective."""

    def __init__(self, trainer: Any) -> None:
        self._trainer: Any = trainer

    def save(self, folder: str | Path | None = None) -> str:
        """Write actor, critic and EMA with optimizers and schedulers, and where the run stands; returns the folder.

        Experience that waits is not kept: its prompts come again. `folder` is of checkpoints; None: `ckpt_path`.
        """
        trainer, options = self._trainer, self._trainer.options.loop
        folder = folder or options.ckpt_path
        tag = f"global_step{trainer.iterations}"
        trainer.strategy.checkpoints.save(
            folder, self._states(), tag, self.state(), max_num=options.max_ckpt_num, max_mem=options.max_ckpt_mem
        )
        if options.save_hf_ckpt:
            self.export()
        return str(folder)

    def export(self) -> None:
        """Write the actor as transformers reads it, under `save_path`."""
        trainer = self._trainer
        folder = Path(trainer.options.loop.save_path) / f"global_step{trainer.iterations}_hf"
        trainer.strategy.save_model(trainer.actor, trainer.tokenizer, str(folder))

    def save_critic(self) -> None:
        """Write the critic beside `save_path`, as `make_critic` reads it; where there is one, and it is asked for."""
        trainer = self._trainer
        if trainer.critic is not None and trainer.options.ppo.save_value_network:
            folder = Path(trainer.options.loop.save_path)
            trainer.strategy.save_model(
                trainer.critic, trainer.tokenizer, str(folder.with_name(f"{folder.name}_critic"))
            )

    def load(self, folder: str | Path | None = None) -> dict[str, Any]:
        """Go on from what `save` wrote, and give the inference engine its weights; returns where the run stands.

        What is missing, damaged or of other models or prompts is refused before anything changes. What fails later (a
        stop) leaves some of it loaded; the engine gets the actor's weights before it next draws.
        """
        trainer, checkpoints, states = self._trainer, self._trainer.strategy.checkpoints, self._states()
        opened = checkpoints.open(folder or trainer.options.loop.ckpt_path, states)
        place = dict(opened.client_state)
        trainer.strategy.control.together("comparing a checkpoint", lambda: self.check_fits(place))
        trainer.went_elsewhere()
        checkpoints.load(opened, states)
        self.restore(place)
        trainer.went_elsewhere()
        trainer.send_weights()
        return place

    def load_newest(self) -> None:
        """`load` where there is something to load; a run that begins begins."""
        strategy, folder = self._trainer.strategy, self._trainer.options.loop.ckpt_path
        if strategy.checkpoints.exist_in(folder):
            self.load()
        else:
            strategy.print(f"no checkpoint in {folder}: starting anew")

    def save_if_due(self, at_the_end: bool = False) -> None:
        """After an iteration, where the option `save_steps` says so; at the end unless that is 0 or it was done."""
        every, done = self._trainer.options.loop.save_steps, self._trainer.iterations
        if (every < 0 and at_the_end) or (every > 0 and (done % every == 0) != at_the_end):
            if self._trainer.options.loop.disable_ds_ckpt:
                self.export()
            else:
                self.save()

    def state(self) -> dict[str, Any]:
        """Where the run stands, as plain values, and what a class of the user's keeps."""
        return {**self.place(), "extra": self._trainer.get_extra_state()}

    def place(self) -> dict[str, Any]:
        """Where the run stands, as plain values."""
        trainer = self._trainer
        return {
            "iterations": trainer.iterations,
            "prompts": None if trainer.prompts is None else trainer.prompts.state(),
            "texts": trainer.pretraining.state(),
            "optimizer_steps": trainer.optimizer_steps,
            "kl_coef": trainer.kl_ctl.coef,
            "maker": trainer.experience_maker.state(),
            "generate_calls": trainer.strategy.generate_calls,
        }

    def check_fits(self, state: dict[str, Any]) -> None:
        """Raise where `restore` would: CheckpointError, DataError, StateError."""
        trainer = self._trainer
        if "iterations" not in state:
            raise CheckpointError("this checkpoint is none of a trainer: it holds a model alone (strategy.load_ckpt)")
        if state.get("extra") is not None and not trainer.takes_extra_state:
            name = type(trainer).__name__
            raise CheckpointError(f"it holds extra state, which {name} cannot take: define set_extra_state(state)")
        if state["prompts"] is not None and trainer.prompts is None:
            raise StateError("the checkpoint has a place in its prompts, and this trainer has none: give prompts=")
        for stream, saved in ((trainer.prompts, state["prompts"]), (trainer.pretraining.stream, state.get("texts"))):
            if stream is not None and saved is not None:
                place = stream.state()
                try:
                    stream.restore(saved)
                finally:
                    stream.restore(place)

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken; changes nothing where it does not fit."""
        trainer = self._trainer
        self.check_fits(state)
        if trainer.prompts is not None and state["prompts"] is not None:
            trainer.prompts.restore(state["prompts"])
        trainer.pretraining.restore(state.get("texts"))
        trainer.iterations = int(state["iterations"])
        trainer.optimizer_steps = int(state["optimizer_steps"])
        trainer.kl_ctl = replace(trainer.kl_ctl, coef=float(state["kl_coef"]))
        trainer.experience_maker.restore(state["maker"])
        trainer.strategy.generate_calls = int(state["generate_calls"])
        if state.get("extra") is not None:
            trainer.set_extra_state(state["extra"])

    def _states(self) -> dict[str, State]:
        trainer = self._trainer
        actor = trainer.strategy.state_of(trainer.actor, trainer.actor_optim, trainer.actor_scheduler)
        return {MODEL: actor, **models_beside(trainer)}


class TrainerState:
    """Of one trainer on one rank; no method holds a collective. `id` tells it from every other on these ranks."""

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
        """Put back what `tensors` and `values` gave, after the policy's own state; the engine's weights are the
        caller's to bring."""
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
        schedule = self._trainer.strategy.state_of(nn.Module(), scheduler=self._trainer.actor_scheduler)
        return {"actor": schedule, **models_beside(self._trainer)}
