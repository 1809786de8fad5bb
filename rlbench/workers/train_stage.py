"""Gathering full weights for a sync or a checksum: collective, one parameter at a time, and interruptible."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlbench.errors import EngineError, Stopped, nearest
from rlbench.nn import BaseTrainModule
from rlbench.strategies.control import ControlGroup, Verdict
from rlbench.weights.cuda_ipc import IpcStage
from rlbench.weights.manifest import Manifest
from rlbench.weights.names import to_checkpoint_names, unique_parameters
from rlbench.weights.shm import DEFAULT_BUCKET_BYTES, ShmStage

VOTE_BYTES = 64 << 20
TRANSPORTS = ("shm", "ipc")


class WeightSender:
    """Stages a rank's module for replicas; the buffers live as long as this object and are reused."""

    def __init__(
        self, module: BaseTrainModule, control: ControlGroup, stop_requested: Callable[[], bool]
    ) -> None:
        self._module = module
        self._control = control
        self._stop_requested = stop_requested
        self._stages: dict[tuple[str, str, int], ShmStage | IpcStage] = {}

    @torch.no_grad()
    def stage(self, transport: str, prefix: str, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Manifest | None:
        """Gather all weights under their checkpoint names into `transport`; collective. Only rank 0 returns.

        Raises:
            Stopped: between two parameters; what was staged is not to be used.
            WeightSyncError: no room in shared memory.
        """
        if transport not in TRANSPORTS:
            raise EngineError(
                f"unknown transport {transport!r}{nearest(transport, TRANSPORTS)}; it is 'shm' or 'ipc'."
            )
        tensors = self._checkpoint_tensors()
        manifest: Manifest | None = None
        failure: Exception | None = None
        try:
            if self._control.rank == 0:
                manifest = self._stage_of(transport, prefix, bucket_bytes).write(tensors)
            for _ in tensors:
                pass
        except Exception as error:  # a user's hook, or a full /dev/shm: the peers must hear of it
            failure = error
        if failure is not None:  # the peers still gather: take part to the end, then tell them
            with contextlib.suppress(EngineError):  # a peer's failure, told below as well
                for _ in tensors:
                    pass
        self._control.raise_together("staging weights", failure)
        return manifest

    def _stage_of(self, transport: str, prefix: str, bucket_bytes: int) -> ShmStage | IpcStage:
        key = (transport, prefix, bucket_bytes)
        if key not in self._stages:
            self._stages[key] = (
                ShmStage(prefix, bucket_bytes) if transport == "shm" else IpcStage(bucket_bytes)
            )
        return self._stages[key]

    def close(self) -> None:
        """Free the buffers."""
        for stage in self._stages.values():
            stage.close()
        self._stages.clear()

    def _checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors as a checkpoint holds them, gathered as they are asked for."""
        renamed = _renames(self._module)
        if renamed is None:  # the architecture merges or splits tensors, which needs all of them
            yield from to_checkpoint_names(self._module, dict(self._full_tensors())).items()
            return
        for name, tensor in self._full_tensors():
            if name not in renamed:  # a name the user's hook made
                renamed[name] = next(iter(to_checkpoint_names(self._module, {name: tensor})))
            yield renamed[name], tensor

    def _full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under the names the module's hook gives them; each tied storage once."""
        state = unique_parameters(self._module)
        parameters = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}
        hook = type(self._module).postprocess_output_named_parameters
        own_hook = hook is not BaseTrainModule.postprocess_output_named_parameters
        interval = (
            0 if own_hook else VOTE_BYTES
        )  # a user's hook may fail: then no rank may enter the next gather
        failure: Exception | None = None
        since_vote = VOTE_BYTES
        for name, tensor in state.items():
            if since_vote >= interval:
                self._vote(failure)
                since_vote = 0
            since_vote += tensor.numel() * tensor.element_size()
            mapped: tuple[str, Tensor] | None = (name, tensor.detach())
            if isinstance(tensor, DTensor):
                try:
                    mapped = self._module.postprocess_output_named_parameters(name, tensor, parameters)
                except Exception as error:  # a user's hook: the next vote ends the sync
                    failure, mapped = error, None
            if mapped is not None:
                full = mapped[1].full_tensor() if isinstance(mapped[1], DTensor) else mapped[1]
                yield mapped[0], full
        self._vote(failure)

    def _vote(self, failure: Exception | None) -> None:
        own = Verdict.FAILED if failure else Verdict.STOP if self._stop_requested() else Verdict.GO
        verdict = self._control.vote(own)
        if verdict is Verdict.FAILED:
            self._control.raise_together("gathering weights", failure)
        if verdict is Verdict.STOP:
            raise Stopped("weight sync stopped while weights were gathered; the replicas keep theirs")


def _renames(module: BaseTrainModule) -> dict[str, str] | None:
    """Checkpoint name of each parameter where the architecture only renames; None where it merges or
    splits."""
    names = list(unique_parameters(module))
    probes = {name: torch.empty(2, 2, device="meta") for name in names}
    by_id = {id(probe): name for name, probe in probes.items()}
    try:
        converted = to_checkpoint_names(module, dict(probes))
    except Exception:  # a conversion looked into the tensors, which probes do not have
        return None
    found = {by_id.get(id(tensor)): name for name, tensor in converted.items()}
    return (
        None if None in found or len(found) != len(names) else {old: new for old, new in found.items() if old}
    )


@torch.no_grad()
def checksum(module: torch.nn.Module) -> str:
    """sha256 over names and full values of all parameters; collective, equal on all ranks and for any
    sharding."""
    digest = hashlib.sha256()
    for name, tensor in sorted(unique_parameters(module).items()):
        full: Any = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode())
        digest.update(full.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
