"""A strategy's models on disk: checkpoints to go on from, and folders that transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlbench.errors import CheckpointError, nearest
from rlbench.strategies import ckpt, hf_folder, memory
from rlbench.strategies.gradients import local
from rlbench.strategies.materialize import allocate, targets
from rlbench.strategies.memory_side import holds_gradients, reshard
from rlbench.strategies.optimizer_groups import names_by_id
from rlbench.strategies.step_side import StepSide

WEIGHTS, OPTIMIZER = "weight/", "optimizer/"
SHOWN = 3


@dataclass(frozen=True)
class OpenedCkpt:
    """A checkpoint that is whole and fits what `open_ckpt` was given; nothing of it is loaded yet."""

    folder: Path
    names: set[str]
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
    values: dict[str, Any]
    settings: list[dict[str, Any]]
    wants_optimizer: bool
    wants_scheduler: bool


class KeepingSide(StepSide):
    """Every method is collective."""

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
        """Write a checkpoint of a model, loadable with any number of ranks, and return its folder.

        Gradients that wait for a step are not part of it. The random states of the ranks are.

        Args:
            model: its parameters and persistent buffers.
            save_dir: folder of checkpoints, of this model alone.
            tag: name of this one; one of the same name is replaced once the new one is whole. None:
                `global_step<N>`, one more than the highest there.
            max_num, max_mem: checkpoints and gigabytes (10^9 bytes) to keep; the oldest are removed once the new
                one is whole. Whatever else lies in `save_dir` is left alone. None: no limit.
            client_state: plain values (of rank 0) that `load_ckpt` gives back.
            save_latest: `load_ckpt(model, save_dir)` takes this one from now on.
            optimizer, scheduler: kept too, if given.

        Raises:
            CheckpointError: see `rlbench.strategies.ckpt.write`.
        """
        reshard(model)
        tensors = {WEIGHTS + name: tensor.detach() for name, tensor in _kept(model).items()}
        values: dict[str, Any] = {"client_state": dict(client_state)}
        if optimizer is not None:
            tensors |= _optimizer_tensors(model, optimizer)
            values["optimizer"] = _optimizer_values(model, optimizer)
        if scheduler is not None:
            values["scheduler"] = scheduler.state_dict()
        if holds_gradients(model):
            self.print("save_ckpt: gradients wait for a step; they are not kept")
        folder, removed = ckpt.write(self.control, save_dir, tag, tensors, values, save_latest, max_num, max_mem)
        self.print(f"checkpoint {folder} written" + (f"; removed {', '.join(removed)}" if removed else ""))
        return folder

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
        random states come back too, so that training goes on as if it had not stopped.

        Args:
            model: prepared or not; one without memory gets it.
            load_dir: a checkpoint, or the folder of several: then the one that `latest` names, else the newest.
            optimizer, scheduler: to load, if given.
            load_module_strict: False: load the parameters that both have, and print which only one has.
            load_optimizer_states, load_lr_scheduler_states: False: leave the optimizer, or the scheduler, as it is.

        Returns:
            The checkpoint's folder, and the `client_state` it was saved with.

        Raises:
            CheckpointError: none there, damaged, of another model, or without what was asked for; found before
                anything is changed.
        """
        opened = self.open_ckpt(
            model, load_dir, optimizer, scheduler, load_module_strict, load_optimizer_states, load_lr_scheduler_states
        )
        self.load_opened(opened, model, optimizer, scheduler)
        return str(opened.folder), opened.values["client_state"]

    def open_ckpt(
        self,
        model: nn.Module,
        load_dir: str,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> OpenedCkpt:
        """The first half of `load_ckpt`, which changes nothing: arguments and errors are its. Several models are loaded
        all or not at all by opening each before the first `load_opened`."""
        folder = self.control.together("looking for a checkpoint", lambda: ckpt.find(load_dir))
        ckpt.check(self.control, folder)
        shapes, values = self.control.together(
            "reading a checkpoint", lambda: (ckpt.shapes_in(folder), ckpt.read_values(folder))
        )
        wants_optimizer = optimizer is not None and load_optimizer_states
        wants_scheduler = scheduler is not None and load_lr_scheduler_states
        reshard(model)
        names = self._names_to_load(folder, model, shapes, load_module_strict)
        for wanted, part, flag in (
            (wants_optimizer, "optimizer", "load_optimizer_states"),
            (wants_scheduler, "scheduler", "load_lr_scheduler_states"),
        ):
            if wanted and part not in values:
                raise CheckpointError(
                    f"{folder} was saved without its {part}; give none, or set {flag}=False to leave it as it is."
                )
        settings = _settings(folder, model, optimizer, values["optimizer"]) if wants_optimizer else []
        return OpenedCkpt(folder, names, shapes, values, settings, wants_optimizer, wants_scheduler)

    def load_opened(
        self,
        opened: OpenedCkpt,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
    ) -> None:
        """The second half of `load_ckpt`: bring what was opened into what was given then."""
        folder, values = opened.folder, opened.values
        self.forget_gradients(model)
        if any(parameter.is_meta for parameter in model.parameters()):
            allocate(model, self.weights_device(model))
        into = {WEIGHTS + name: tensor.detach() for name, tensor in _kept(model).items() if name in opened.names}
        if opened.wants_optimizer and optimizer is not None:
            into |= _optimizer_targets(model, optimizer, opened.shapes)
        ckpt.read_tensors(self.control, folder, into)
        if opened.wants_optimizer and optimizer is not None:
            self._put_optimizer(model, optimizer, into, values["optimizer"], opened.settings)
            ckpt.restore_random(self.control, folder)
        if opened.wants_scheduler:
            scheduler.load_state_dict(values["scheduler"])
        self.sync_and_clear_cache()
        self.print(f"checkpoint {folder} loaded")

    def save_model(self, model: nn.Module, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        """Write a folder that transformers and vLLM load: weights, config, tokenizer. Rank 0 writes it.

        Args:
            model: of transformers (or a PEFT model of one: its adapter is written), or a wrapper whose `model` is
                that; sharded or not. It is gathered to rank 0's host memory, one parameter at a time.
            tokenizer: saved beside it; None: not.
            output_dir: made if it is not there; files of an earlier save are replaced once the new ones are whole.
            kwargs: of `save_pretrained` (`max_shard_size`, …).

        Raises:
            CheckpointError: no transformers model, or no room.
        """
        inner = hf_folder.transformers_model(self.unwrap_model(model))
        reshard(model)
        state = hf_folder.gather_state(inner, self.is_rank_0())

        def write() -> None:
            if self.is_rank_0():
                hf_folder.write(inner, state, tokenizer, Path(output_dir), kwargs)

        self.control.together("saving the model", write)
        self.print(f"model saved to {output_dir}")

    # -- parts -----------------------------------------------------------------------------------------------

    def _names_to_load(
        self, folder: Path, model: nn.Module, shapes: Mapping[str, tuple[torch.Size, torch.dtype]], strict: bool
    ) -> set[str]:
        held = {name: tensor.shape for name, tensor in _kept(model).items()}
        kept = {n.removeprefix(WEIGHTS): shape for n, (shape, _) in shapes.items() if n.startswith(WEIGHTS)}
        missing, unexpected = sorted(held.keys() - kept.keys()), sorted(kept.keys() - held.keys())
        said = []
        if missing:
            close = nearest(missing[0], unexpected)
            said.append(f"{len(missing)} of the model's are not in it ({_some(missing)}{close})")
        if unexpected:
            said.append(f"{len(unexpected)} of it are not the model's ({_some(unexpected)})")
        if said and strict:
            raise CheckpointError(
                f"{folder} does not fit {type(model).__name__}: {'; '.join(said)}. load_module_strict=False loads "
                "what both have."
            )
        wrong = [name for name in sorted(held.keys() & kept.keys()) if held[name] != kept[name]]
        if wrong:
            name = wrong[0]
            raise CheckpointError(
                f"{folder} does not fit {type(model).__name__}: {name} is {tuple(kept[name])} there and "
                f"{tuple(held[name])} here ({len(wrong)} differ)."
            )
        if missing and any(parameter.is_meta for parameter in model.parameters()):
            raise CheckpointError(
                f"{folder} cannot fill {type(model).__name__}, which has no weights yet: {'; '.join(said)}."
            )
        if said:
            self.print(f"loading {folder} in part: {'; '.join(said)}")
        return held.keys() & kept.keys()

    def _put_optimizer(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        read: Mapping[str, Tensor],
        kept: Mapping[str, Any],
        settings: list[dict[str, Any]],
    ) -> None:
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        for name, parameter in _named(model, optimizer):
            prefix = f"{OPTIMIZER}{name}/"
            state = dict(kept["plain"].get(name, {}))
            state |= {n.removeprefix(prefix): t for n, t in read.items() if n.startswith(prefix)}
            if state:
                optimizer.state[parameter] = state
            else:
                optimizer.state.pop(parameter, None)
        if self.optimizer_away(optimizer):
            memory.move_optimizer(optimizer, torch.device("cpu"))


def _kept(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, each under its first name, and persistent buffers."""
    first = {name for name, _ in model.named_parameters()}
    parameters = {id(parameter) for parameter in model.parameters()}
    return {n: t for n, t in targets(model).items() if n in first or id(t) not in parameters}


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    names = names_by_id(model)
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer steps a parameter of shape {tuple(parameter.shape)} that "
                    f"{type(model).__name__} does not have; give the one that was made over this model, prepared."
                )
            found.append((names[id(parameter)], parameter))
    return found


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{OPTIMIZER}{name}/{key}": value
        for name, parameter in _named(model, optimizer)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _optimizer_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is no tensor: settings by the parameters they are for, since other ranks may group them otherwise."""
    names = names_by_id(model)
    groups = [
        {
            "names": [names[id(parameter)] for parameter in group["params"]],
            "settings": {key: value for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    plain = {
        name: {k: v for k, v in optimizer.state.get(parameter, {}).items() if not isinstance(v, Tensor)}
        for name, parameter in _named(model, optimizer)
    }
    return {"class": type(optimizer).__name__, "groups": groups, "plain": {k: v for k, v in plain.items() if v}}


def _settings(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, kept: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The kept settings of each group of the optimizer."""
    assert optimizer is not None
    if type(optimizer).__name__ != kept["class"]:
        raise CheckpointError(
            f"{folder} holds the state of {kept['class']}, and the optimizer is {type(optimizer).__name__} (is "
            "use_mp_opt set as it was?); load_optimizer_states=False leaves it as it is."
        )
    by_name = {name: group["settings"] for group in kept["groups"] for name in group["names"]}
    names = names_by_id(model)
    found = []
    for group in optimizer.param_groups:
        own = [by_name.get(names.get(id(parameter), ""), {}) for parameter in group["params"]]
        if any(not settings or settings != own[0] for settings in own):
            raise CheckpointError(
                f"{folder} was saved with an optimizer over other parameters or groups; load_optimizer_states=False "
                "leaves this one as it is."
            )
        found.append(own[0])
    return found


def _optimizer_targets(
    model: nn.Module, optimizer: torch.optim.Optimizer, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Empty tensors for the kept state, sharded as this model's parameters are."""
    found: dict[str, Tensor] = {}
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for name, parameter in _named(model, optimizer):
        prefix = f"{OPTIMIZER}{name}/"
        for full, (shape, dtype) in shapes.items():
            if full.startswith(prefix) and shape == parameter.shape and len(shape) > 0:
                found[full] = torch.zeros_like(parameter, dtype=dtype)
            elif full.startswith(prefix):  # a step counter: where torch's kernels want it
                where = local(parameter).device if on_device else torch.device("cpu")
                found[full] = torch.zeros(shape, dtype=dtype, device=where)
    return found


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
