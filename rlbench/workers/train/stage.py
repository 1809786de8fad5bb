"""Gathering full weights for a sync or a checksum: collective, one parameter at a time.

Staging is interruptible; sending, which replicas load at the same time, only until it starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlbench.dispatch.context import current
from rlbench.errors import EngineError, Stopped, WeightSyncError, nearest
from rlbench.nn import BaseTrainModule
from rlbench.strategies.ranks.control import ControlGroup, Verdict
from rlbench.user_code import user_code
from rlbench.weights import broadcast
from rlbench.weights.channel import Channel
from rlbench.weights.cuda_ipc import IpcStage
from rlbench.weights.manifest import Bucket, Manifest, planned
from rlbench.weights.names import to_checkpoint_names, unique_parameters
from rlbench.weights.shm import DEFAULT_BUCKET_BYTES, ShmStage

STAGED = ("shm", "ipc")
T = TypeVar("T")
VOTE_BYTES = 64 << 20
Named = Iterator[tuple[str, Tensor]]


class WeightSender:
    """Gives a rank's module to replicas. What it holds for that (buffers, groups) is reused from sync to sync.

    `module`: with the hooks of `rlbench.nn`, or without (a model of transformers). It is not kept alive.
    """

    def __init__(self, module: torch.nn.Module, control: ControlGroup, stop_requested: Callable[[], bool]) -> None:
        self._held = weakref.ref(module)
        self._control = control
        self._stop_requested = stop_requested
        self._stages: dict[tuple[str, str, int], ShmStage | IpcStage] = {}
        self._channels: dict[str, Channel] = {}
        self._stoppable = True
        self._failure: Exception | None = None

    @property
    def _module(self) -> torch.nn.Module:
        module = self._held()
        assert module is not None  # whoever calls holds it
        return module

    def gives(self, module: torch.nn.Module) -> bool:
        """Whether this is the module it was made for."""
        return self._held() is module

    @torch.no_grad()
    def stage(
        self, transport: str, prefix: str, bucket_bytes: int = DEFAULT_BUCKET_BYTES, ranks: Sequence[int] = (0,)
    ) -> Manifest | None:
        """Gather all weights under their checkpoint names into `transport`; collective. Only `ranks` write and return.

        Raises:
            Stopped: between two parameters; what was staged is not to be used.
            WeightSyncError: no room in shared memory.
        """
        if transport not in STAGED:
            raise EngineError(
                f"transport {transport!r} is not staged{nearest(transport, STAGED)}; {' and '.join(STAGED)} are."
            )
        tensors = self._checkpoint_tensors(_gathered)
        if self._control.rank not in ranks:
            self._consume("staging weights", tensors, lambda: None)
            return None
        return self._consume(
            "staging weights", tensors, lambda: self._stage_of(transport, prefix, bucket_bytes).write(tensors)
        )

    @torch.no_grad()
    def give(self, doing: str, take: Callable[[Named], T]) -> T | None:
        """Gather all weights under their checkpoint names and let rank 0 `take` them; collective, interruptible.

        Only rank 0 returns what `take` gave.
        """
        tensors = self._checkpoint_tensors(_gathered)
        if self._control.rank != 0:
            self._consume(doing, tensors, lambda: None)
            return None
        return self._consume(doing, tensors, lambda: take(tensors))

    @property
    def is_hooked(self) -> bool:
        """Whether code of the user's is given the parameters themselves as they are sent."""
        return self._own_hook() is not None

    def release_staged(self) -> None:
        """Free what was staged on this rank's GPU; shared memory stays, to be written again at its full speed."""
        for key, stage in self._stages.items():
            if key[0] == "ipc":
                stage.close()

    def forget_staged(self, prefix: str) -> None:
        """Free what was staged under `prefix`: it will not be staged again soon."""
        for key in [key for key in self._stages if key[1] == prefix]:
            self._stages.pop(key).close()

    # -- broadcast: announced first, so that replicas can refuse before any of their weights is touched

    @torch.no_grad()
    def layout(self) -> Manifest:
        """Names, types and shapes of all weights as a sync sends them; collective. Raises as `announce`."""
        tensors = self._checkpoint_tensors(_shape_only)

        def plan() -> tuple[Bucket, ...]:
            layout = ((n, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.nbytes) for n, t in tensors)
            return planned(layout, DEFAULT_BUCKET_BYTES)

        return Manifest("layout", self._consume("announcing weights", tensors, plan))

    @torch.no_grad()
    def announce(self, to: str, sender: int, host: str, world_size: int, backend: str, held: str) -> Manifest | None:
        """Say what `send` will send, and where the group meets; collective. Nothing is gathered for it but what a
        `postprocess_output_named_parameters` of the user's own gathers.

        Args:
            to: name of the inference engine; the sender keeps one group for each.
            sender: the rank that sends, and returns.
            host: this node's address for the replicas.
            world_size: the sender and all replica workers.
            backend: "nccl" or "gloo".
            held: token of the group that all the replicas are in, to be used again if it is ours; empty: none.

        Raises:
            Stopped: it was asked to; nothing has happened yet.
            WeightSyncError: the architecture's weights must be looked at to be named, or a name comes twice.
        """
        buckets = self.layout().buckets
        mine = self._control.rank == sender
        device = next(self._module.parameters()).device

        def meeting_place() -> Manifest | None:
            known = self._channels.pop(to, None)
            if known is not None and not (mine and known.open and known.info.token == held):
                known.close()
                known = None
            if not mine:
                return None
            channel = self._channels[to] = known or Channel.listen(host, world_size, backend, device)
            return Manifest("broadcast", buckets, channel.info)

        manifest: Manifest | None = self._control.together("opening a group", meeting_place)
        return manifest

    @torch.no_grad()
    def send(self, to: str, manifest: Manifest) -> None:
        """Gather all weights and broadcast them to the replicas, which load them meanwhile; collective.

        Raises:
            Stopped: before anything was sent. From then on a stop is not heard: replicas have all weights, or none.
            WeightSyncError: a replica failed or is gone; the group is given up, the next sync makes another.
        """
        channel = self._channels.get(to)

        def meet() -> None:
            if channel is not None:
                channel.form()
                channel.begin()

        try:
            self._control.together("meeting the replicas", meet)
            self._vote(None)
            if channel is not None:
                channel.release()
            self._stoppable = False
            tensors = self._checkpoint_tensors(_gathered)
            transmit = partial(broadcast.send, channel, manifest, tensors) if channel is not None else lambda: None
            self._consume("sending weights", tensors, transmit, channel)
        except BaseException as error:
            if channel is not None:
                channel.fail(error)
                channel.close()
            raise
        finally:
            self._stoppable = True

    def give_up(self, to: str, reason: str) -> None:
        """Tell all members of the group to `to` to give up; from any thread."""
        channel = self._channels.get(to)
        if channel is not None:
            channel.fail(reason)

    @property
    def channels(self) -> tuple[tuple[str, str], ...]:
        """The groups this rank sends to: engine and token."""
        return tuple((to, channel.info.token) for to, channel in list(self._channels.items()) if channel.open)

    # -- gathering

    def _consume(self, doing: str, tensors: Named, work: Callable[[], T], channel: Channel | None = None) -> T:
        """Run `work`, which takes from `tensors`, and take the rest; where it fails on one rank it fails on all."""
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
            for _ in tensors:
                pass
        except Exception as error:  # a user's hook, a full /dev/shm, a replica that is gone: the peers must hear of it
            failure = self._failure = error
            if channel is not None:
                channel.fail(error)  # at once: the replicas wait
        if failure is not None:  # the peers still gather: take part until the next vote tells them
            with contextlib.suppress(EngineError):  # a peer's failure, told below as well
                for _ in tensors:
                    pass
        self._failure = None
        self._control.raise_together(doing, failure)
        return cast(T, result)

    def _stage_of(self, transport: str, prefix: str, bucket_bytes: int) -> ShmStage | IpcStage:
        key = (transport, prefix, bucket_bytes)
        if key not in self._stages:
            self._stages[key] = ShmStage(prefix, bucket_bytes) if transport == "shm" else IpcStage(bucket_bytes)
        return self._stages[key]

    def close(self) -> None:
        """Free the buffers and leave the groups."""
        for holder in (*self._stages.values(), *self._channels.values()):
            holder.close()
        self._stages.clear()
        self._channels.clear()

    def _checkpoint_tensors(self, full: Callable[[Tensor], Tensor]) -> Named:
        """Tensors as a checkpoint holds them, made `full` as they are asked for."""
        renamed = _renames(self._module)
        if renamed is None:  # the architecture merges or splits tensors, which needs all of them
            tensors = dict(self._full_tensors(full))
            try:
                yield from to_checkpoint_names(self._module, tensors).items()
            except (NotImplementedError, RuntimeError) as error:
                if full is not _shape_only:
                    raise
                raise WeightSyncError(
                    f"the weights of {type(self._module).__name__} cannot be named without their contents ({error}), "
                    'so transport="broadcast" cannot announce them: use transport="shm" or "ipc"'
                ) from error
            return
        for name, tensor in self._full_tensors(full):
            if name not in renamed:  # a name the user's hook made
                renamed[name] = next(iter(to_checkpoint_names(self._module, {name: tensor})))
            yield renamed[name], tensor

    def _full_tensors(self, full: Callable[[Tensor], Tensor]) -> Named:
        """Full tensors under the names the module's hook gives them; each tied storage once."""
        state = unique_parameters(self._module)
        parameters = {name: tensor for name, tensor in state.items() if isinstance(tensor, DTensor)}
        hook = self._own_hook()
        interval = 0 if hook else VOTE_BYTES  # a user's hook may fail: then no rank may enter the next gather
        failure: Exception | None = None
        since_vote, moved = VOTE_BYTES, 0
        for name, tensor in state.items():
            if since_vote >= interval:
                self._vote(failure)
                since_vote = 0
            since_vote += tensor.numel() * tensor.element_size()
            mapped: tuple[str, Tensor] | None = (name, tensor.detach())
            if hook and isinstance(tensor, DTensor):  # the plain one only gathers, which `full` does, or need not
                try:
                    with user_code():
                        mapped = hook(name, tensor, parameters)
                except Exception as error:  # a user's hook: the next vote ends the sync
                    failure, mapped = error, None
            if mapped is not None:
                whole = full(mapped[1])
                moved += whole.nbytes
                current().report(bytes=moved)
                yield mapped[0], whole
        self._vote(failure)

    def _own_hook(self) -> Callable[..., tuple[str, Tensor] | None] | None:
        """The `postprocess_output_named_parameters` of the user's own; None where it is the plain one."""
        plain = BaseTrainModule.postprocess_output_named_parameters
        hook: Callable[..., tuple[str, Tensor] | None] = getattr(
            self._module, "postprocess_output_named_parameters", MethodType(plain, self._module)
        )
        return None if getattr(hook, "__func__", None) is plain else hook

    def _vote(self, failure: Exception | None) -> None:
        failure = failure or self._failure
        stop = self._stoppable and self._stop_requested()
        own = Verdict.FAILED if failure else Verdict.STOP if stop else Verdict.GO
        verdict = self._control.vote(own)
        if verdict is Verdict.FAILED:
            self._control.raise_together("gathering weights", failure)
        if verdict is Verdict.STOP:
            raise Stopped("weight sync stopped while weights were gathered; the replicas keep theirs")


def _gathered(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on the ranks' device even where its shards live in host memory; collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.to_local().device.type != tensor.device_mesh.device_type:  # fsdp_cpu_offload, on a GPU
        tensor = tensor.to(tensor.device_mesh.device_type)
    return tensor.full_tensor()


def _shape_only(tensor: Tensor) -> Tensor:
    """A tensor of that shape and type without contents."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _renames(module: torch.nn.Module) -> dict[str, str] | None:
    """Checkpoint name of each parameter where the architecture only renames; None where it merges or splits."""
    names = list(unique_parameters(module))
    probes = {name: torch.empty(2, 2, device="meta") for name in names}
    by_id = {id(probe): name for name, probe in probes.items()}
    try:
        converted = to_checkpoint_names(module, dict(probes))
    except Exception:  # a conversion looked into the tensors, which probes do not have
        return None
    found = {by_id.get(id(tensor)): name for name, tensor in converted.items()}
    return None if None in found or len(found) != len(names) else {old: new for old, new in found.items() if old}


@torch.no_grad()
def checksum(module: torch.nn.Module) -> str:
    """sha256 over names and full values of all parameters; collective, equal on all ranks and for any sharding."""
    digest = hashlib.sha256()
    for name, tensor in sorted(unique_parameters(module).items()):
        full: Any = _gathered(tensor)
        digest.update(name.encode())
        digest.update(full.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
