"""What a trainer of texts keeps: the policy with its optimizer, and the place in the texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlbench.errors import CheckpointError
from rlbench.trainers.ppo.state import TrainerCheckpoints

if TYPE_CHECKING:
    from rlbench.trainers.texts.trainer import SPMDTextTrainer


class TextCheckpoints(TrainerCheckpoints):
    """Saves and loads one trainer of texts; every method is collective."""

    _trainer: SPMDTextTrainer

    def state(self) -> dict[str, Any]:
        """Where the run stands, as plain values."""
        return self.place()

    def place(self) -> dict[str, Any]:
        """Where the run stands, as plain values."""
        trainer = self._trainer
        return {
            "iterations": trainer.iterations,
            "optimizer_steps": trainer.optimizer_steps,
            "texts": trainer.texts.state(),
        }

    def check_fits(self, state: dict[str, Any]) -> None:
        """Raise where `restore` would: CheckpointError, DataError."""
        if "iterations" not in state or "maker" in state:
            raise CheckpointError("this checkpoint is none of a trainer of texts")
        self._trainer.texts.copy().restore(state["texts"])

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken; changes nothing where it does not fit."""
        self.check_fits(state)
        self._trainer.texts.restore(state["texts"])
        self._trainer.iterations = int(state["iterations"])
        self._trainer.optimizer_steps = int(state["optimizer_steps"])
