"""What a trainer keeps on disk: checkpoints to go on from, the model as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench.data import Mixture, PromptStream
from rlbench.errors import CheckpointError, StateError
from rlbench.rl import AdaptiveKL, FixedKL
from rlbench.strategies import ckpt

if TYPE_CHECKING:
    from rlbench.trainers.ppo_trainer import PPOTrainer

ACTOR, CRITIC, EMA = "_actor", "_critic", "_ema"


class Checkpoints:
    """Saves and loads one trainer; every method is collective."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer

    def save(self, folder: str | Path | None = None) -> str:
        """Write actor, critic and EMA with optimizers and schedulers, and where the run stands; returns the folder.

        Experience that waits is not kept: its prompts come again.

        Args:
            folder: None: the option `ckpt_path`.
        """
        trainer = self._trainer
        options, strategy = trainer.options.ppo, trainer.strategy
        where = Path(folder or options.ckpt_path)
        tag = f"global_step{trainer.iterations}"
        state = self.state()
        for name, model, optimizer, scheduler in reversed(self._parts()):  # the actor last: `load` goes by it
            strategy.save_ckpt(
                model,
                str(where / name),
                tag,
                options.max_ckpt_num,
                options.max_ckpt_mem,
                client_state=state if name == ACTOR else {},
                optimizer=optimizer,
                scheduler=scheduler,
            )
        if options.save_hf_ckpt:
            strategy.save_model(trainer.actor, trainer.tokenizer, str(Path(options.save_path) / f"{tag}_hf"))
        return str(where)

    def load(self, folder: str | Path | None = None) -> dict[str, Any]:
        """Go on from what `save` wrote, and give the inference engine its weights; returns where the run stands.

        All parts are taken of one save, the newest that has the actor.

        Raises:
            CheckpointError: there is none, or it is damaged or of other models. DataError, StateError: it is of other
                prompts. Nothing has changed then. What fails later (a file that cannot be read any more, a stop) leaves
                some of it loaded; the engine gets the actor's weights before it next draws.
        """
        trainer = self._trainer
        where = Path(folder or trainer.options.ppo.ckpt_path)
        folders, found = trainer.strategy.control.together("looking for a checkpoint", lambda: self._found(where))
        strategy = trainer.strategy
        parts = [
            (strategy.open_ckpt(model, str(folders[name]), optimizer, scheduler), model, optimizer, scheduler)
            for name, model, optimizer, scheduler in self._parts()
        ]
        trainer.went_elsewhere()
        for part in parts:
            strategy.load_opened(*part)
        self.restore(found)
        trainer.went_elsewhere()
        trainer.send_weights()
        return dict(found)

    def _found(self, where: Path) -> tuple[dict[str, Path], dict[str, Any]]:
        """The folder of each part, all of one save, and where the run stood; it fits this trainer."""
        actor = ckpt.find(str(where / ACTOR))
        folders = {name: ckpt.find(str(where / name / actor.name)) for name, *_ in self._parts()}
        state = ckpt.read_values(actor)["client_state"]
        self.check_fits(state)
        return folders, state

    def load_newest(self) -> None:
        """`load` where there is something to load; a run that begins begins."""
        there = (Path(self._trainer.options.ppo.ckpt_path) / ACTOR).is_dir()
        if all(self._trainer.strategy.control.gather(there)):
            self.load()
        else:
            self._trainer.strategy.print(f"no checkpoint in {self._trainer.options.ppo.ckpt_path}: starting anew")

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
        trainer.kl_ctl = _with_coef(trainer.kl_ctl, float(state["kl_coef"]))
        trainer.experience_maker.restore(state["maker"])
        trainer.strategy.generate_calls = int(state["generate_calls"])
        if state.get("extra") is not None:
            trainer.set_extra_state(state["extra"])

    def _parts(self) -> list[tuple[str, Any, Any, Any]]:
        trainer = self._trainer
        parts = [(ACTOR, trainer.actor, trainer.actor_optim, trainer.actor_scheduler)]
        if trainer.critic is not None:
            parts.append((CRITIC, trainer.critic, trainer.critic_optim, trainer.critic_scheduler))
        if trainer.ema_model is not None:
            parts.append((EMA, trainer.ema_model, None, None))
        return parts


def _try(stream: PromptStream | Mixture, state: dict[str, Any]) -> None:
    """Raise where a stream cannot go to `state`; it stays where it is."""
    place = stream.state()
    try:
        stream.restore(state)
    finally:
        stream.restore(place)


def _with_coef(controller: FixedKL | AdaptiveKL, coef: float) -> FixedKL | AdaptiveKL:
    return replace(controller, coef=coef)
