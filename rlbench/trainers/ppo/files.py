"""What a trainer keeps on disk: checkpoints to go on from, the model as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench.checkpoint.rank_state import State
from rlbench.data import Mixture, PromptStream
from rlbench.errors import CheckpointError, StateError
from rlbench.strategies.checkpoints import MODEL, state_of
from rlbench.trainers.ppo.state import models_beside

if TYPE_CHECKING:
    from rlbench.trainers.ppo.trainer import PPOTrainer


class Checkpoints:
    """Saves and loads one trainer; every method is collective."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer

    def save(self, folder: str | Path | None = None) -> str:
        """Write actor, critic and EMA with optimizers and schedulers, and where the run stands; returns the folder.

        Experience that waits is not kept: its prompts come again.

        Args:
            folder: of checkpoints; None: the option `ckpt_path`.
        """
        trainer, options = self._trainer, self._trainer.options.ppo
        folder = folder or options.ckpt_path
        tag = f"global_step{trainer.iterations}"
        trainer.strategy.checkpoints.save(
            folder, self._states(), tag, self.state(), max_num=options.max_ckpt_num, max_mem=options.max_ckpt_mem
        )
        if options.save_hf_ckpt:
            trainer.strategy.save_model(trainer.actor, trainer.tokenizer, str(Path(options.save_path) / f"{tag}_hf"))
        return str(folder)

    def load(self, folder: str | Path | None = None) -> dict[str, Any]:
        """Go on from what `save` wrote, and give the inference engine its weights; returns where the run stands.

        Raises:
            CheckpointError: there is none, or it is damaged or of other models. DataError, StateError: it is of other
                prompts. Nothing has changed then. What fails later (a file that cannot be read any more, a stop) leaves
                some of it loaded; the engine gets the actor's weights before it next draws.
        """
        trainer, checkpoints, states = self._trainer, self._trainer.strategy.checkpoints, self._states()
        opened = checkpoints.open(folder or trainer.options.ppo.ckpt_path, states)
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
        strategy, folder = self._trainer.strategy, self._trainer.options.ppo.ckpt_path
        if strategy.checkpoints.exist_in(folder):
            self.load()
        else:
            strategy.print(f"no checkpoint in {folder}: starting anew")

    def save_if_due(self) -> None:
        """After an iteration, where the option `save_steps` says so."""
        every = self._trainer.options.ppo.save_steps
        if every > 0 and self._trainer.iterations % every == 0:
            self.save()

    def save_at_the_end(self) -> None:
        """At the end of `fit`, unless `save_steps` is 0 or the last iteration was saved."""
        every = self._trainer.options.ppo.save_steps
        if every < 0 or (every > 0 and self._trainer.iterations % every):
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
            raise CheckpointError(
                f"it holds extra state of a trainer's own class, and {type(trainer).__name__} defines no "
                "set_extra_state(state): use the class that saved it"
            )
        if state["prompts"] is not None:
            if trainer.prompts is None:
                raise StateError("the checkpoint has a place in its prompts, and this trainer has none: give prompts=")
            _try(trainer.prompts, state["prompts"])
        if state.get("texts") is not None and trainer.pretraining.stream is not None:
            _try(trainer.pretraining.stream, state["texts"])

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
        actor = state_of(trainer.actor, trainer.actor_optim, trainer.actor_scheduler)
        return {MODEL: actor, **models_beside(trainer)}


def _try(stream: PromptStream | Mixture, state: dict[str, Any]) -> None:
    """Raise where a stream cannot go to `state`; it stays where it is."""
    place = stream.state()
    try:
        stream.restore(state)
    finally:
        stream.restore(place)
