"""Gathering full weights for a sync or a checksum: collective, one parameter at a time. Staging is interruptible;
sending, which replicas load at the same time, only until it starts."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rlbench.dispatch.context import current
from rlbench.errors import EngineError, Stopped, WeightSyncError, nearest
from rlbench.nn.lora import PEFT_PREFIX, Adapted, plain_name
from rlbench.nn.quantised import quantised_layers
from rlbench.strategies.optim.gradients import numbers_of
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.user_code import user_code
from rlbench.weights.channel import Channel, send
from rlbench.weights.delta import Copies
from rlbench.weights.manifest import Handover, Layout, Manifest
from rlbench.weights.names import to_checkpoint_names, unique_parameters
from rlbench.weights.staging import DEFAULT_BUCKET_BYTES, IpcStage, ShmStage
from rlbench.workers.train.sent import WHOLE, Sent, SyncPart
from rlbench.workers.train.whole import (
    adapter_info,
    checkpoint_names,
    own_hook,
    shape_only,
    weight_of,
    whole_tensor,
)

STAGED = ("shm", "ipc")
ADAPTER = "-adapter"
T = TypeVar("T")
VOTE_BYTES = 64 << 20
Named = Iterator[tuple[str, Tensor]]


class WeightSender:
    """Gives a rank's module, which it does not keep alive, to replicas; buffers and groups are reused."""

    def __init__(self, module: torch.nn.Module, control: ControlGroup, stop_requested: Callable[[], bool]) -> None:
        self._held = weakref.ref(module)
        self._control = control
        self._stop_requested = stop_requested
        self._stages: dict[tuple[str, str, int], ShmStage | IpcStage] = {}
        self._channels: dict[str, Channel] = {}
        self._copies: dict[str, Copies] = {}
        self._sent = Sent(control)
        self._layers: tuple[tuple[Any, ...], dict[str, str]] | None = None
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
        self,
        transport: str,
        prefix: str,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        ranks: Sequence[int] = (0,),
        adapter: int = 0,
        handover: Handover | None = None,
    ) -> Manifest | None:
        """Gather all weights by their checkpoint names into `transport`, or the adapter alone, where it has a number
        there; collective. Only `ranks` write and return. Of a `handover` to replicas that hold an earlier sync's, only
        what changed."""
        if transport not in STAGED:
            raise EngineError(
                f"transport {transport!r} is not staged{nearest(transport, STAGED)}; {' and '.join(STAGED)} are."
            )
        prefix += ADAPTER if adapter else ""
        key, about = (transport, prefix, bucket_bytes), adapter_info(self._module, adapter) if adapter else None
        part = self._part(handover, adapter, key if transport == "shm" else None)
        if part is WHOLE:
            self._sent.forget(key)

        def write(tensors: Named) -> Manifest:
            if key not in self._stages:
                self._stages[key] = ShmStage(prefix, bucket_bytes) if transport == "shm" else IpcStage(bucket_bytes)
            stage = self._stages[key]
            if part.left_out and isinstance(stage, ShmStage):
                return part.told_in(stage.rewrite(tensors))
            return part.told_in(replace(stage.write(tensors), adapter=about))

        work = write if self._control.rank in ranks else None
        manifest = self._consume("staging weights", whole_tensor, work, adapter=adapter > 0, left_out=part.left_out)
        self._sent.note(part)
        return manifest

    @torch.no_grad()
    def give(self, doing: str, take: Callable[[Named], T], adapter: bool = False) -> T | None:
        """Gather all weights by their checkpoint names, or the `adapter` as peft saves it; rank 0 returns what `take`
        gives. Collective."""
        tensors = self._own_adapter(whole_tensor, Adapted.of(self._module)) if adapter else None
        return self._consume(doing, whole_tensor, take if self._control.rank == 0 else None, tensors=tensors)

    @property
    def is_hooked(self) -> bool:
        """Whether code of the user's is given the parameters themselves as they are sent."""
        return own_hook(self._module) is not None

    def release_staged(self) -> None:
        """Free what was staged on this rank's GPU; shared memory stays, to be written again at its full speed."""
        for key, stage in self._stages.items():
            if key[0] == "ipc":
                stage.close()

    def forget_staged(self, prefix: str) -> None:
        """Free what was staged under `prefix`: it will not be staged again soon."""
        for key in [key for key in self._stages if key[1] == prefix]:
            self._stages.pop(key).close()
            self._sent.forget(key)

    def _part(
        self,
        handover: Handover | None,
        adapter: int,
        stage: tuple[str, str, int] | None,
        everything: bool = False,
    ) -> SyncPart:
        """What of the weights a handover takes; all of them where there is none, or a rank sends `everything`;
        collective."""
        return WHOLE if handover is None or adapter else self._sent.part(self._module, handover, stage, everything)

    # -- broadcast: announced first, so that replicas can refuse before any of their weights is touched

    @torch.no_grad()
    def layout(self, adapter: int = 0, left_out: Set[str] = frozenset()) -> Manifest:
        """Names, types and shapes of all weights but those `left_out` (of the adapter, where it has a number) as a sync
        sends them; collective. Raises as `announce`."""
        plan, doing = partial(Layout, DEFAULT_BUCKET_BYTES), "announcing weights"
        placed = cast(Layout, self._consume(doing, shape_only, plan, adapter=adapter > 0, left_out=left_out))
        return Manifest("layout", placed.buckets, adapter=adapter_info(self._module, adapter) if adapter else None)

    @torch.no_grad()
    def announce(
        self,
        to: str,
        sender: int,
        host: str,
        world_size: int,
        backend: str,
        held: str,
        handover: Handover,
        adapter: int = 0,
    ) -> Manifest | None:
        """Say what `send` will send to engine `to`, and where its group of `world_size` meets; collective; the `sender`
        returns. `held`: token of the group that all the replicas are in, to be used again if it is ours; `handover` as
        in `stage`; what goes as differences follows on what the `sender` sent last, else all goes."""
        mine = self._control.rank == sender
        copies = self._copies.setdefault(to, Copies()) if mine and handover.delta else None
        follows = handover.held if copies is not None and copies.token == handover.held else ""
        part = self._part(handover, adapter, None, everything=copies is not None and not follows)
        layout = part.told_in(self.layout(adapter, part.left_out))
        if copies is None:
            self._copies.pop(to, None)  # another rank sends, or all of it
        else:
            layout = replace(layout, delta=True, follows=follows, token=handover.token)
        device = next(self._module.parameters()).device

        def meeting_place() -> Manifest | None:
            known = self._channels.pop(to, None)
            same = known is not None and (known.info.token, known.info.world_size) == (held, world_size)
            if known is not None and not (mine and known.open and same):
                known.close()
                known = None
            if not mine:
                return None
            channel = self._channels[to] = known or Channel.listen(host, world_size, backend, device)
            return replace(layout, transport="broadcast", channel=channel.info)

        manifest: Manifest | None = self._control.together("opening a group", meeting_place)
        self._sent.note(part)
        return manifest

    @torch.no_grad()
    def send(self, to: str, manifest: Manifest) -> int:
        """Gather what was announced and broadcast it to the replicas, which load it meanwhile; collective. From the
        first on a stop is not heard; where a replica failed the group is given up, and the next sync makes another.
        Return the bytes that this rank sent."""
        channel = self._channels.get(to)
        copies = self._copies[to] if manifest.delta and channel is not None else None

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
            transmit = None if channel is None else partial(send, channel, manifest, copies=copies)
            adapter, left_out = manifest.adapter is not None, {entry.name for entry in manifest.left_out}
            sent = self._consume("sending weights", whole_tensor, transmit, channel, adapter, left_out=left_out)
            return sent or 0
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
        return tuple((to, channel.info.token) for to, channel in self._channels.copy().items() if channel.open)

    def _consume(
        self,
        doing: str,
        full: Callable[[Tensor], Tensor],
        work: Callable[[Named], T] | None,
        channel: Channel | None = None,
        adapter: bool = False,
        tensors: Named | None = None,
        left_out: Set[str] = frozenset(),
    ) -> T | None:
        """Give all `tensors` (None: all weights but those `left_out`, or the `adapter`, as a replica takes them), made
        `full`, to `work` (None: to nobody); where it fails on one rank it fails on all."""
        if tensors is None:
            tensors = self._adapter_tensors(full) if adapter else self._checkpoint_tensors(full, left_out)
        result: T | None = None
        try:
            if work is not None:
                result = work(tensors)
            for _ in tensors:
                pass
        except Exception as error:  # a user's hook, a full /dev/shm, a replica that is gone: the peers must hear of it
            self._failure = error
            if channel is not None:
                channel.fail(error)  # at once: the replicas wait
            with contextlib.suppress(EngineError):  # a peer's failure, told below as well
                for _ in tensors:  # the peers still gather: take part until the next vote tells them
                    pass
        failure, self._failure = self._failure, None
        self._control.raise_together(doing, failure)
        return result

    def close(self) -> None:
        """Free the buffers and leave the groups."""
        for holder in (*self._stages.values(), *self._channels.values()):
            holder.close()
        self._stages.clear()
        self._channels.clear()
        self._copies.clear()
        self._sent = Sent(self._control)

    def _checkpoint_tensors(self, full: Callable[[Tensor], Tensor], left_out: Set[str] = frozenset()) -> Named:
        """Tensors as a checkpoint holds them, but those `left_out`, made `full` as they are asked for."""
        renamed = checkpoint_names(self._module)
        if renamed is None:  # the architecture merges or splits tensors, which needs all of them
            tensors = dict(self._full_tensors(full))
            try:
                yield from to_checkpoint_names(self._module, tensors).items()
            except (NotImplementedError, RuntimeError) as error:
                if full is not shape_only:
                    raise
                raise WeightSyncError(
                    f"the weights of {type(self._module).__name__} cannot be named without their contents ({error}), "
                    'so transport="broadcast" cannot announce them: use transport="shm" or "ipc"'
                ) from error
            return
        for name, tensor in self._full_tensors(full, {old for old, new in renamed.items() if new in left_out}):
            if name not in renamed:  # a name the user's hook made
                renamed[name] = next(iter(to_checkpoint_names(self._module, {name: tensor})))
            yield renamed[name], tensor

    def _adapter_tensors(self, full: Callable[[Tensor], Tensor]) -> Named:
        """The adapter's tensors, on layers called as a checkpoint calls them."""
        adapted = Adapted.of(self._module)
        called = self._called(adapted)
        for name, tensor in self._own_adapter(full, adapted):
            path, _, end = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
            yield f"{PEFT_PREFIX}{called[path]}.lora_{end}", tensor

    def _called(self, adapted: Adapted) -> dict[str, str]:
        """Return what a checkpoint calls each adapted layer, which is found out once for the same layers: it takes
        longer than all else of a small adapter."""
        key = (type(self._module), *adapted.layers)
        if self._layers is None or self._layers[0] != key:
            renamed = checkpoint_names(self._module)
            if renamed is None:
                raise WeightSyncError(
                    f"{type(self._module).__name__} merges or splits the layers of its checkpoint, so vLLM has none "
                    "that its adapters are on: leave Inference(adapters=…) out, and they are sent merged into the "
                    "weights"
                )
            names = {path: renamed[f"{path}.weight"].removesuffix(".weight") for path in adapted.layers}
            self._layers = key, names
        return self._layers[1]

    def _own_adapter(self, full: Callable[[Tensor], Tensor], adapted: Adapted) -> Named:
        """The adapter's tensors as peft saves them."""
        self._vote(None)
        for name, tensor in adapted.peft_parameters():
            yield name, full(tensor).detach()  # of a DTensor `detach` takes longer than the rest
        self._vote(None)

    def _full_tensors(self, full: Callable[[Tensor], Tensor], left_out: Set[str] = frozenset()) -> Named:
        """Full tensors under the names the module's hook gives them, but those `left_out`; each tied storage once."""
        state, adapted = unique_parameters(self._module), Adapted.of(self._module)
        own, adapters = self.is_hooked, adapted.adapter_names()
        parameters = {name: tensor for name, tensor in state.items() if hasattr(tensor, "full_tensor")}
        hook = own_hook(self._module)
        interval = 0 if hook else VOTE_BYTES  # a user's hook may fail: then no rank may enter the next gather
        failure: Exception | None = None
        since_vote, moved = VOTE_BYTES, 0
        for name, tensor in state.items():
            if name in left_out or (name in adapters and not own):  # adapters come merged into the base
                continue
            if since_vote >= interval:
                self._vote(failure)
                since_vote = 0
            since_vote += numbers_of([tensor]) * tensor.element_size()  # on all ranks alike
            mapped: tuple[str, Tensor] | None = (name, tensor)
            if hook and name in parameters:  # the plain one only gathers, which `full` does, or need not
                try:
                    with user_code():
                        mapped = hook(name, tensor, parameters)
                except Exception as error:  # a user's hook: the next vote ends the sync
                    failure, mapped = error, None
            if mapped is not None and mapped[0] not in adapters:  # a hook may pass on what no checkpoint has
                whole = full(mapped[1]).detach()  # of a DTensor, before, that takes longer than the rest
                if adapters and not own:
                    mapped, whole = (plain_name(name), whole), adapted.merged(name, whole, full)
                moved += whole.nbytes
                current().report(bytes=moved)
                yield mapped[0], whole
        for path, layer in quantised_layers(self._module).items():
            if since_vote >= VOTE_BYTES:
                self._vote(failure)
                since_vote = 0
            name, whole = f"{path}.weight", weight_of(layer, full)
            since_vote += whole.nbytes
            yield plain_name(name), adapted.merged(name, whole, full)
        self._vote(failure)

    def _vote(self, failure: Exception | None) -> None:
        asked = self._stoppable and self._stop_requested()
        if self._control.stops("gathering weights", self._failure if failure is None else failure, asked):
            raise Stopped("weight sync stopped while weights were gathered; the replicas keep theirs")
