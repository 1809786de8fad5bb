"""vLLM's side of a weight sync: a WeightTransferEngine of ours and the workers that register and use it.

vLLM creates the engine by name inside each worker process, so the name must be registered there: the module
that holds the worker class does it (`worker_cls` is imported in every worker). The order of calls is vLLM's
own: `start_weight_update`, `update_weights` once per bucket, `finish_weight_update`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.worker.gpu_worker import Worker

from rlbench.errors import WeightSyncError
from rlbench.weights import facts
from rlbench.weights.broadcast import receive
from rlbench.weights.channel import Channel
from rlbench.weights.cuda_ipc import IpcReader
from rlbench.weights.facts import LOOPBACK
from rlbench.weights.manifest import Bucket, ChannelInfo
from rlbench.weights.memory import release_caches
from rlbench.weights.shm import ShmReader

BACKEND = "rlbench"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The group by which the next update comes, for transport "broadcast"; a bucket of another says where it lies."""

    channel: ChannelInfo | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket of a manifest and the transport it came by."""

    transport: str
    bucket: Bucket


class BucketTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads buckets (shared memory, CUDA IPC, broadcasts) in checkpoint format, layer by layer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shm = ShmReader()
        self._ipc = IpcReader(self.device)
        self._channel: Channel | None = None
        self._packed_before: weakref.WeakSet[Any] = weakref.WeakSet()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """For a broadcast: join the group (once), and wait until the sender begins. Touches no weight.

        Raises:
            PeerFailed: the sender gave up, or is gone.
        """
        info = init_info.channel
        if info is None:
            return
        try:
            if self._channel is None or self._channel.info.token != info.token:
                self._leave()
                address = LOOPBACK if info.host == LOOPBACK else facts.address()
                rank = info.first_rank + self.parallel_config.rank
                self._channel = Channel.join(info, rank, self.device, address)
                with _as_outside_vllm(info.backend):
                    self._channel.form()
            self._channel.begin()
        except BaseException as error:
            self._leave(error)
            raise

    def start_weight_update(self) -> None:
        """Put the layers into the state in which they take checkpoint tensors."""
        self._packed_before = packed_copies(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one bucket. A failure leaves the layers whole again, but with undefined weights: the caller
        must not serve them (the replica is then `torn`).
        """
        try:
            self.model.load_weights(self._tensors(update_info))
        except BaseException as error:
            self._leave(error)
            # Without this the half-loaded layers would keep their buffered tensors and mix them into the next
            # sync.
            self.finish_weight_update()
            raise

    def finish_weight_update(self) -> None:
        """Pack what was loaded, the tied head included."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_stale(self.model, self._packed_before)
        self._ipc.close()

    def shutdown(self) -> None:
        """Drop the mappings and leave the group."""
        self._shm.close()
        self._ipc.close()
        self._leave()

    def _leave(self, reason: BaseException | None = None) -> None:
        """Leave the group; with a reason, its other members give up too."""
        channel, self._channel = self._channel, None
        if channel is not None:
            if reason is not None:
                channel.fail(reason)
            channel.close()

    def _tensors(self, update: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        if update.transport == "shm":
            return self._shm.read(update.bucket)
        if update.transport == "ipc":
            return self._ipc.read(update.bucket)
        if update.transport != "broadcast" or self._channel is None:
            raise WeightSyncError(f"no way for weights by {update.transport!r} is open here: sync again")
        return receive(self._channel, update.bucket)


@contextlib.contextmanager
def _as_outside_vllm(backend: str) -> Iterator[None]:
    """vLLM pins NCCL settings in its processes; a communicator shared with others must be made without them."""
    if backend != "nccl":
        yield
        return
    from vllm.utils.nccl import unpinned_nccl_env

    with unpinned_nccl_env():
        yield


def packed_copies(model: torch.nn.Module) -> weakref.WeakSet[Any]:
    """The packed copies (`cpu_linear`) that modules compute with now; not kept alive, as they are as large as weights.

    Not their ids: a new copy may lie where an old one was.
    """
    return weakref.WeakSet(module.cpu_linear for module in model.modules() if hasattr(module, "cpu_linear"))


def repack_stale(model: torch.nn.Module, packed_before: weakref.WeakSet[Any]) -> None:
    """Pack again what an update left packed from the old weights: the tied lm_head.

    vLLM on CPU computes with a packed copy of each linear weight. Layer-wise reload renews it for layers that
    were loaded by name; a tied lm_head never is, and would go on computing with the old weights, without an
    error and invisible to checksums. Linear layers keep no weight beside the packed one, so a module that has
    both is an embedding or a head; those whose packed copy is still the one of `packed_before` are stale.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        stale = getattr(module, "cpu_linear", None) in packed_before
        if stale and isinstance(weight, torch.Tensor) and weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]


class ReplicaWorkerMixin:
    """What a replica asks of its workers beyond vLLM's own calls; the same on CPU and GPU."""

    _weight_update_active: bool

    def reload_from_disk(self) -> None:
        """Load the checkpoint again (also after the weights were discarded) and pack the tied head."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        before = packed_copies(model)
        self.reload_weights()  # type: ignore[attr-defined]
        repack_stale(model, before)

    def transfer(self, method: str, *args: Any) -> tuple[str, bool] | None:
        """Run a method of vLLM's weight transfer; a failure is a value: (what, whether it only follows another's).

        Where one of several workers raises, vLLM leaves the others' answers in its queue, for the next call to read.
        """
        try:
            getattr(self, method)(*args)
        except Exception as error:
            logging.getLogger(__name__).debug("%s failed", method, exc_info=True)
            return f"{type(error).__name__}: {error}", bool(getattr(error, "secondary", False))
        return None

    def start_weight_update(self) -> None:
        """As vLLM's; an update that is still open here, since it failed on another worker alone, is over: its
        half-loaded layers would count what they hold to what comes."""
        if self._weight_update_active:
            self.weight_transfer_engine.finish_weight_update()  # type: ignore[attr-defined]
            self.weight_transfer_engine.reset_weight_update_target()  # type: ignore[attr-defined]
            self._weight_update_active = False
        super().start_weight_update()  # type: ignore[misc]

    def finish_weight_update(self) -> None:
        """As vLLM's, but a failure ends the update too: a later one would be refused as nested otherwise."""
        try:
            super().finish_weight_update()  # type: ignore[misc]
        except BaseException:
            self._weight_update_active = False
            raise

    def release_memory_cache(self, cpu: bool, gpu: bool) -> dict[str, int]:
        """Give back what this worker's allocators keep; see `rlbench.weights.memory.release_caches`."""
        return release_caches(cpu, gpu)

    def describe(self) -> dict[str, Any]:
        """Process id, GPU, bytes of the weights, and (address, bytes) of each KV buffer, of this worker."""
        runner = self.model_runner  # type: ignore[attr-defined]
        return {
            "pid": os.getpid(),
            "gpu": facts.gpu_uuid(self.device),  # type: ignore[attr-defined]
            "weights": weight_bytes(runner.model),
            "kv_ranges": [(storage.data_ptr(), storage.nbytes()) for storage in kv_storages(runner)],
        }


class GpuReplicaWorker(ReplicaWorkerMixin, Worker):
    """vLLM's GPU worker; sleep and wake_up are vLLM's own (`enable_sleep_mode`)."""


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes the weights take: storages of parameters, plus packed copies, which PyTorch does not see."""
    storages = {s._cdata: s.nbytes() for s in (p.untyped_storage() for p in model.parameters())}
    packed = {id(value): nbytes for module in model.modules() for value, nbytes in _packed(module)}
    return sum(storages.values()) + sum(packed.values())


def kv_storages(runner: Any) -> list[torch.UntypedStorage]:
    """The distinct storages behind all KV tensors (vLLM 0.32: one buffer, all layers are views of it)."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors_in(runner.kv_caches):
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
    return list(found.values())


def _packed(module: torch.nn.Module) -> Iterable[tuple[object, int]]:
    """What a module's `cpu_linear` closure holds: oneDNN handles (rows x columns of the weight's dtype) or
    tensors.
    """
    for cell in getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ():
        held = cell.cell_contents
        if isinstance(held, torch.Tensor):
            yield held, held.untyped_storage().nbytes()
        elif hasattr(held, "handler_tensor") and held.handler_tensor is not None:
            itemsize = getattr(module, "params_dtype", torch.get_default_dtype()).itemsize
            yield held, held.n * held.k * itemsize


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors_in(inner)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
