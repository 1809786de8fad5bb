"""A strategy's models on disk: checkpoints to go on from, and folders that transformers loads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlbench.checkpoint import folder as folders
from rlbench.checkpoint import hf_folder, writer
from rlbench.checkpoint.rank_state import State, set_random_state
from rlbench.checkpoint.writer import Opened
from rlbench.errors import CheckpointError
from rlbench.strategies.memory import owners as memory
from rlbench.strategies.memory.offloading import HOST, holds_gradients, reshard
from rlbench.strategies.optim.gradients import gathered
from rlbench.strategies.sharding.materialize import allocate
from rlbench.strategies.sharding.preparation import names_by_id, need_parameters

if TYPE_CHECKING:
    from rlbench.strategies.base import StrategyBase

KIND, MODEL = "strategy", "model"
TAG = re.compile(r"[\w][\w.@+=-]*")
NUMBERED = re.compile(r"global_step(\d+)$")
FLAGS = "load_module_strict=False, load_optimizer_states=False, load_lr_scheduler_states=False"


class Checkpoints:
    """Saves and loads states by part (`model`, `critic`, …) for a strategy; every method is collective."""

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy

    def save_ckpt(
        self,
        model: nn.Module,
        save_dir: str,
        tag: str | None = None,
        max_num: int | None = 3,
        max_mem: float | None = 1000,
        client_state: Mapping[str, Any] = {},
        save_latest: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
    ) -> str:
        """Write a checkpoint of a model, loadable with any number of ranks, and return its folder. The random states of
        the ranks are part of it, gradients that wait for a step are not.

        Args:
            model: its parameters and buffers.
            save_dir: folder of checkpoints, of this model alone.
            tag: name of this one; one of the same name is replaced once the new one is whole. None:
                `global_step<N>`, one more than the highest there.
            max_num, max_mem: checkpoints and gigabytes (10^9 bytes) to keep; the oldest are removed once the new
                one is whole. Whatever else lies in `save_dir` is left alone. None: no limit.
            client_state: plain values (of rank 0) that `load_ckpt` gives back.
            save_latest: `load_ckpt(model, save_dir)` takes this one from now on.
            optimizer, scheduler: kept too, if given.
        """
        states = {MODEL: self._strategy.state_of(model, optimizer, scheduler)}
        return self.save(save_dir, states, tag, client_state, latest=save_latest, max_num=max_num, max_mem=max_mem)

    def load_ckpt(
        self,
        model: nn.Module,
        load_dir: str,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> tuple[str, dict[str, Any]]:
        """Bring a model to a checkpoint of `save_ckpt`, whatever number of ranks wrote it.

        Gradients that wait for a step are dropped. With an optimizer to load, and as many ranks as wrote it, the
        random states come back too, so that training goes on as if it had not stopped. Of a trainer's checkpoint this
        is the actor. What does not fit is found before anything is changed.

        Args:
            model: prepared or not; one without memory gets it.
            load_dir: a checkpoint, or the folder of several: then the newest that was saved with `save_latest`, else
                the newest.
            optimizer, scheduler: to load, if given.
            load_module_strict: False: load the parameters that both have, and print which only one has.
            load_optimizer_states, load_lr_scheduler_states: False: leave the optimizer, or the scheduler, as it is.

        Returns:
            The checkpoint's folder, and the `client_state` it was saved with.
        """
        trained = optimizer if load_optimizer_states else None, scheduler if load_lr_scheduler_states else None
        states = {MODEL: self._strategy.state_of(model, *trained)}
        opened = self.open(load_dir, states, load_module_strict)
        self.load(opened, states)
        return str(opened.folder), dict(opened.client_state)

    def save(
        self,
        folder: str | Path,
        states: Mapping[str, State],
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},
        *,
        latest: bool = True,
        max_num: int | None = 3,
        max_mem: float | None = 1000,
    ) -> str:
        """Write a checkpoint and return its folder; arguments as of `save_ckpt`."""
        strategy, root = self._strategy, Path(folder)
        if max_num is not None and max_num < 1:
            raise CheckpointError(f"max_num={max_num}: at least the new checkpoint is kept; give 1 or more, or None.")
        if tag is not None and not TAG.fullmatch(tag):
            raise CheckpointError(f"tag={tag!r} cannot name a folder; use letters, digits and any of _ . - + = @")
        for state in states.values():
            for which in state.optimizers:
                stepped = [parameter for group in state.stepped(which) for parameter in group]
                need_parameters(stepped, names_by_id(state.module), state.module)
            if holds_gradients(state.module):
                strategy.print("save_ckpt: gradients wait for a step; they are not kept")
        saved = writer.save(
            strategy.control,
            root,
            tag or strategy.control.gather(_next_tag(root))[0],
            states,
            kind=KIND,
            client_state=client_state,
            replace=True,
            latest=latest,
            max_num=max_num,
            max_gb=max_mem,
        )
        removed = f"; removed {', '.join(saved.removed)}" if saved.removed else ""
        strategy.print(f"checkpoint {saved.path} written{removed}")
        return saved.path

    def exist_in(self, folder: str | Path) -> bool:
        """Whether all ranks see a checkpoint there."""
        return all(self._strategy.control.gather(bool(folders.checkpoints_in(Path(folder), KIND))))

    def open(self, folder: str | Path, states: Mapping[str, State], strict: bool = True) -> Opened:
        """Read a checkpoint (or the newest in a folder) and see that it fits `states`, by part; nothing is changed.

        `strict`: refuse parameters and buffers that only one of both has; else they are told.
        """
        control = self._strategy.control
        place = control.together("looking for a checkpoint", lambda: folders.find(Path(folder), KIND))
        for state in states.values():
            reshard(state.module)
        opened = writer.open_checkpoint(control, place, states)
        differences = control.together(
            "comparing a checkpoint",
            lambda: [
                _compare(opened, part, state, strict, self._strategy.is_empty(state.module))
                for part, state in states.items()
            ],
        )
        for difference in filter(None, differences):
            self._strategy.print(f"loading {place} in part: {difference}")
        return opened

    def load(self, opened: Opened, states: Mapping[str, State]) -> None:
        """Bring states to what `open` read for them; see `load_ckpt`."""
        strategy = self._strategy
        for part, state in states.items():
            strategy.forget_gradients(state.module)
            if any(parameter.is_meta for parameter in state.module.parameters()):
                allocate(state.module, strategy.weights_device(state.module))
            state.load(*opened.part(part))
            strategy.note_weights(state.module)
            for optimizer in filter(strategy.optimizer_away, state.optimizers.values()):
                memory.move_optimizer(optimizer, HOST)
        if opened.random is not None and any(state.optimizers for state in states.values()):
            set_random_state(opened.random)
        strategy.sync_and_clear_cache()
        strategy.print(f"checkpoint {opened.folder} loaded")

    def save_model(self, model: nn.Module, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        """Write a folder that transformers and vLLM load: weights, config, tokenizer. Rank 0 writes it.

        Args:
            model: of transformers (or a PEFT model of one: its adapter is written), or a wrapper whose `model` is
                that; sharded or not. It is gathered to rank 0's host memory, one parameter at a time.
            tokenizer: saved beside it; None: not.
            output_dir: made if it is not there; files of an earlier save are replaced once the new ones are whole.
            kwargs: of `save_pretrained` (`max_shard_size`, …).
        """
        strategy = self._strategy
        inner = hf_folder.transformers_model(strategy.unwrap_model(model))
        reshard(model)
        state = hf_folder.gather_state(inner, strategy.is_rank_0(), gathered)

        def write() -> None:
            if strategy.is_rank_0():
                save = hf_folder.fill_by_transformers
                fill = partial(save, model=inner, state=state, tokenizer=tokenizer, options=kwargs)
                hf_folder.write_folder(Path(output_dir), fill)

        strategy.control.together("saving the model", write)
        strategy.print(f"model saved to {output_dir}")


def _compare(opened: Opened, part: str, state: State, strict: bool, is_empty: bool) -> str:
    """Raise where a part does not fit; return which names are not shared, in words."""
    tensors, values = opened.part(part)
    owner = f"{opened.folder} does not fit {type(state.module).__name__}"
    for kind, wanted in (("optimizer", state.optimizers), ("scheduler", state.schedulers)):
        if wanted and not values[f"{kind}s"]:
            raise CheckpointError(
                f"{owner}: it was saved without its {kind}; give none, or leave it as it is ({FLAGS})."
            )
    wanted_values = {**values, "optimizers": values["optimizers"] if state.optimizers else {}}
    try:
        difference = state.check(tensors, wanted_values, exact=False, partial=not strict)
    except CheckpointError as error:
        raise CheckpointError(f"{owner}: {error}. strategy.load_ckpt can leave parts as they are ({FLAGS}).") from error
    if difference and is_empty:
        raise CheckpointError(f"{owner}, which has no weights yet: {difference}.")
    return difference


def _next_tag(root: Path) -> str:
    numbers = [int(m[1]) for path in folders.checkpoints_in(root, KIND) if (m := NUMBERED.match(path.name))]
    return f"global_step{max(numbers, default=0) + 1}"
