"""vLLM's side of a weight sync: a WeightTransferEngine of ours and the workers that register and use it.

vLLM creates the engine by name inside each worker process, where this module is imported for `worker_cls`. It calls
`start_weight_update`, `update_weights` once per bucket, and `finish_weight_update`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.utils.nccl import unpinned_nccl_env
from vllm.v1.worker.gpu_worker import Worker

from rlbench.errors import BuildError, WeightSyncError
from rlbench.weights import facts
from rlbench.weights.aside import Aside
from rlbench.weights.channel import Channel, receive
from rlbench.weights.delta import Copies
from rlbench.weights.gloo import share_devices
from rlbench.weights.manifest import AdapterInfo, Bucket, ChannelInfo
from rlbench.weights.memory import release_caches
from rlbench.weights.staging import ShmReader, read_ipc
from rlbench.weights.vllm_adapters import HeldAdapters
from rlbench.weights.vllm_direct import Direct, Straight
from rlbench.weights.vllm_names import unname_shared_memory
from rlbench.weights.vllm_reload import Reload, packed_copies, repack_stale
from rlbench.weights.vllm_routing import RoutingRecord

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
    part: bool = False  # of an update by some of the weights
    delta: bool = False  # its tensors come as differences to the copies held
    layout: int = 0  # of all tensors of the update, where they may go straight to their places (`vllm_direct.py`)


class BucketTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads buckets (shared memory, CUDA IPC, broadcasts) in checkpoint format, layer by layer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shm = ShmReader()
        self._channel: Channel | None = None
        self.copies = Copies()
        self._packed_before: weakref.WeakSet[Any] = weakref.WeakSet()
        self._update: Reload | Straight | None = None  # that is open; None: nothing came yet
        self._direct = Direct(self.model, self.model_config, weakref.WeakKeyDictionary())

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """For a broadcast: join the group (once), and wait until the sender begins. Touches no weight."""
        info = init_info.channel
        if info is None:
            return
        try:
            if self._channel is None or self._channel.info.token != info.token:
                self._leave()
                address = info.host if info.host == facts.LOOPBACK else facts.address()
                rank = info.first_rank + self.parallel_config.rank
                self._channel = Channel.join(info, rank, self.device, address)
                # vLLM pins NCCL settings in its processes; a communicator shared with others is made without them
                with unpinned_nccl_env() if info.backend == "nccl" else contextlib.nullcontext():
                    self._channel.form()
            self._channel.begin()
        except BaseException as error:
            self._leave(error)
            raise

    def start_weight_update(self) -> None:
        """Begin an update; its layers take tensors once the first bucket says which will come."""
        self._packed_before, self._update = packed_copies(self.model), None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one bucket. A failure leaves whole layers with undefined weights, not to be served (`torn`)."""
        try:
            if self._update is None:
                layout = update_info.layout if self.device.type == "cpu" else 0
                self._update = self._direct.update(update_info.part, layout)
            self._update.load(self.tensors(update_info))
        except BaseException as error:
            self._leave(error)
            self.end_weight_update()  # else half-loaded layers would mix what they hold into the next sync
            raise

    def finish_weight_update(self) -> None:
        """Pack what was loaded, the tied head included; WeightSyncError where some of the weights left a layer in part
        as it was, which a whole set does not."""
        update = self._update
        loaded = None if update is None else update.loaded()
        self.end_weight_update()
        if update is not None and loaded is not None:
            update.need_whole_layers(loaded)

    def end_weight_update(self) -> None:
        """Pack what was loaded so far, whether or not it is all."""
        update, self._update = self._update, None
        if update is not None:
            update.end()
        repack_stale(self.model, self._packed_before)
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()  # the sender has its memory back

    def shutdown(self) -> None:
        """Drop the mappings and leave the group."""
        self._shm.close()
        self._leave()

    def _leave(self, reason: BaseException | None = None) -> None:
        """Leave the group; with a reason, its other members give up too."""
        channel, self._channel = self._channel, None
        if channel is not None:
            if reason is not None:
                channel.fail(reason)
            channel.close()

    def tensors(self, update: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """Read a bucket by the transport it came by."""
        if update.transport == "shm":
            return self._shm.read(update.bucket)
        if update.transport == "ipc":
            return read_ipc(update.bucket, self.device)
        if update.transport != "broadcast" or self._channel is None:
            raise WeightSyncError(f"no way for weights by {update.transport!r} is open here: sync again")
        return receive(self._channel, update.bucket, self.copies if update.delta else None)


class ReplicaWorkerMixin:
    """What a replica asks of its workers beyond vLLM's own calls; the same on CPU and GPU."""

    _weight_update_active: bool
    _put_back: Callable[[], None]

    def init_device(self) -> None:
        """As vLLM's, which makes a dozen process groups."""
        share_devices()
        super().init_device()  # type: ignore[misc]

    def load_model(self, **options: Any) -> None:
        """As vLLM's; adapters have a place around the layers that a trainer adapts: those of a tower too, embeddings
        and output layer not, of which vLLM on CPU cannot give prompts' log-probs then (Qwen3)."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if not runner.lora_config:
            super().load_model(**options)  # type: ignore[misc]
            return
        wrap = runner.load_lora_model

        def wrap_linear(model: torch.nn.Module, *args: Any) -> torch.nn.Module:
            for module in model.modules():
                if getattr(module, "embedding_modules", None):
                    module.embedding_modules = {}  # type: ignore[assignment]
            return wrap(model, *args)  # type: ignore[no-any-return]

        runner.load_lora_model = wrap_linear
        super().load_model(**options)  # type: ignore[misc]
        sees = self.model_config.is_multimodal_model  # type: ignore[attr-defined]
        if sees and not runner.lora_manager.supports_tower_connector_lora():
            name = type(runner.model).__name__
            raise BuildError(
                f"adapters={runner.lora_config.max_loras}: vLLM computes none on the tower of {name} here, and would "
                "drop them. Leave adapters= out, and they are sent merged into the weights"
            )

    def reload_from_disk(self) -> None:
        """Load the checkpoint again (also after the weights were discarded) and pack the tied head."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        before = packed_copies(model)
        self.reload_weights()  # type: ignore[attr-defined]
        repack_stale(model, before)

    def transfer(self, method: str, *args: Any) -> tuple[str, bool] | None:
        """Run a method of vLLM's weight transfer; a failure is a value: (what, whether it only follows another's).

        Where one of several workers raises, vLLM leaves the others' answers for the next call to read.
        """
        try:
            getattr(self, method)(*args)
        except Exception as error:
            logging.getLogger(__name__).debug("%s failed", method, exc_info=True)
            return f"{type(error).__name__}: {error}", bool(getattr(error, "secondary", False))
        return None

    def begin_copies(self, follows: str) -> None:
        """Expect weights as differences to the copies held of sync `follows`; "": all of them whole."""
        self.weight_transfer_engine.copies.begin(follows)  # type: ignore[attr-defined]

    def hold_copies(self, token: str) -> None:
        """All of a sync came: the copies are its."""
        self.weight_transfer_engine.copies.hold(token)  # type: ignore[attr-defined]

    def start_weight_update(self) -> None:
        """As vLLM's; an update that is still open here, since it failed on another worker alone, is over."""
        if self._weight_update_active:
            self.weight_transfer_engine.end_weight_update()  # type: ignore[attr-defined]
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

    def start_adapter(self, info: AdapterInfo, layout: int) -> None:
        """See `HeldAdapters.start`."""
        self._adapters.start(info, layout)

    def take_adapter(self, update: dict[str, Any]) -> None:
        """Take one bucket of an adapter."""
        self._adapters.take(self.weight_transfer_engine.tensors(UpdateInfo(**update)))  # type: ignore[attr-defined]

    def finish_adapter(self) -> None:
        """See `HeldAdapters.finish`."""
        self._adapters.finish()

    @functools.cached_property
    def _adapters(self) -> HeldAdapters:
        return HeldAdapters(self.model_runner)  # type: ignore[attr-defined]

    def set_aside(self, number: int) -> None:
        """Keep what is served until `put_back`: adapter `number`, or with 0 the model's own weights."""
        if number:
            self._put_back = self._adapters.set_aside(number)
        else:
            self._put_back = Aside(self.model_runner.model).put_back  # type: ignore[attr-defined]

    def put_back(self) -> None:
        """Serve again what was set aside."""
        put_back = self._put_back
        del self._put_back  # and with it the copies
        put_back()

    def record_routing(self) -> None:
        """Record from now on which experts each token takes."""
        self._routing = RoutingRecord(self.model_runner)  # type: ignore[attr-defined]

    def routing_of(self, requests: Sequence[tuple[str, int]]) -> list[np.ndarray | None]:
        """See `RoutingRecord.of`."""
        return self._routing.of(self.model_runner, requests)  # type: ignore[attr-defined]

    def release_memory_cache(self, cpu: bool, gpu: bool) -> dict[str, int]:
        """Give back what this worker's allocators keep; see `rlbench.weights.memory.release_caches`."""
        return release_caches(cpu, gpu)

    def unname_shared_memory(self) -> None:
        """See `rlbench.weights.vllm_names`."""
        unname_shared_memory()

    def describe(self) -> dict[str, Any]:
        """Process id, GPU, bytes of the weights, and (address, bytes) of each KV buffer, of this worker."""
        runner = self.model_runner  # type: ignore[attr-defined]
        return {
            "pid": os.getpid(),
            "gpu": facts.gpu_uuid(self.device),  # type: ignore[attr-defined]
            "weights": _weight_bytes(runner.model),
            "kv_ranges": [(storage.data_ptr(), storage.nbytes()) for storage in kv_storages(runner)],
        }


class GpuReplicaWorker(ReplicaWorkerMixin, Worker):
    """vLLM's GPU worker; sleep and wake_up are vLLM's own (`enable_sleep_mode`)."""


def _weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the weights: storages of parameters, and packed copies, which closures hold."""
    sizes = {storage._cdata: storage.nbytes() for storage in (p.untyped_storage() for p in model.parameters())}
    for module in model.modules():
        for cell in getattr(getattr(module, "cpu_linear", None), "__closure__", None) or ():
            value = cell.cell_contents
            if isinstance(value, torch.Tensor):
                sizes[id(value)] = value.untyped_storage().nbytes()
            elif getattr(value, "handler_tensor", None) is not None:  # of oneDNN
                itemsize = getattr(module, "params_dtype", torch.get_default_dtype()).itemsize
                sizes[id(value)] = value.n * value.k * itemsize
    return sum(sizes.values())


def kv_storages(runner: Any) -> list[torch.UntypedStorage]:
    """Return the distinct storages behind all KV tensors (vLLM 0.32: one buffer, all layers are views of it)."""
    tensors = [leaf for leaf in tree_leaves(runner.kv_caches) if isinstance(leaf, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return list({storage._cdata: storage for storage in storages}.values())


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
