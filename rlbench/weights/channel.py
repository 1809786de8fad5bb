"""A group for broadcasts between one training rank and all replica workers: NCCL on GPUs, gloo on CPUs.

Before each broadcast everybody says in the sender's TCP store that it is ready, and whoever fails says so there: none
waits for a member that will not come, as vLLM's own groups would. A group that saw a failure is never used again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlbench.errors import WeightSyncError
from rlbench.weights.delta import HEAD, Copies, message_bytes
from rlbench.weights.manifest import Bucket, ChannelInfo, Manifest
from rlbench.weights.staging import view
from rlbench.weights.transport import PeerFailed

PEER_LIMIT_S = 300.0  # for a member that is alive and says nothing; a death shows at once
CONNECT_LIMIT_S = 60.0
_REASON_LENGTH = 600


class Channel:
    """One member's end: `listen` or `join`, `form`, and for each sync `begin` and one `broadcast` per bucket.

    Where a member failed, died or did not come in time, all raise PeerFailed. All but `fail` belongs to one thread.
    """

    def __init__(self, info: ChannelInfo, rank: int, device: torch.device, store: dist.TCPStore, address: str) -> None:
        self.info = info
        self.rank = rank
        self.device = device if info.backend == "nccl" else torch.device("cpu")
        self._store: dist.Store | None = store
        self._signal: dist.Store | None = store.clone()  # `fail` comes from another thread, which must not wait
        self._address = address
        self._group: Any = None
        self._step = 0

    @classmethod
    def listen(cls, host: str, world_size: int, backend: str, device: torch.device) -> Channel:
        """Make the sender's end, which serves the store on `host` alone."""
        try:
            listener = socket.create_server((host, 0), backlog=max(16, world_size))
        except OSError as error:
            raise WeightSyncError(
                f"the sending rank cannot listen on {host} ({error.strerror}): the node's address must be its own"
            ) from error
        info = ChannelInfo(secrets.token_hex(8), host, int(listener.getsockname()[1]), world_size, backend)
        store = _store(info, is_master=True, master_listen_fd=listener.detach())
        for key, value in {"failed": "", "go": "0", **{f"ready/{rank}": "0" for rank in range(1, world_size)}}.items():
            store.set(key, value)
        return cls(info, 0, device, store, host)

    @classmethod
    def join(cls, info: ChannelInfo, rank: int, device: torch.device, address: str) -> Channel:
        """Make a receiver's end, bound to `address` on this node."""
        with _lost("connecting to it"):
            # the sender listens before anybody is asked to join: refused means gone (TCPStore would try on and on)
            socket.create_connection((info.host, info.port), CONNECT_LIMIT_S).close()
            return cls(info, rank, device, _store(info, is_master=False), address)

    @property
    def open(self) -> bool:
        """True until `close`."""
        return self._store is not None

    def form(self) -> None:
        """Make the group, once all members are there; collective."""
        if self._group is not None:
            return
        self.begin()
        self.release()
        with _lost("forming the group"):
            store = dist.PrefixStore("group", self._open_store())
            self._group = _backend(self.info, store, self.rank, self._address)
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects in its first operation

    def begin(self) -> None:
        """Meet before a step. The sender returns once all receivers are there; a receiver once the sender let it go."""
        self._step += 1
        if self.rank == 0:
            receivers = [f"ready/{rank}" for rank in range(1, self.info.world_size)]
            self._wait_until(lambda: min(map(int, self._look(receivers))) >= self._step)
        else:
            with _lost("meeting it"):
                self._open_store().set(f"ready/{self.rank}", str(self._step))
            self._wait_until(lambda: int(self._look(["go"])[0]) >= self._step)

    def release(self) -> None:
        """Let the receivers that wait in `begin` go, where this is the sender."""
        if self.rank == 0:
            self._open_store().set("go", str(self._step))

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Send or receive one buffer; the same size on all members."""
        if buffer.numel() == 0:
            return
        self.begin()
        self.release()
        with _lost("a broadcast"):
            work = self._group.broadcast(buffer, 0)
            self._wait_until(work.is_completed)
            work.wait()

    def fail(self, reason: BaseException | str) -> None:
        """Tell all members to give up. Any thread, never waits long; the first reason counts."""
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        signal = self._signal
        if signal is not None:
            with contextlib.suppress(RuntimeError):  # the sender is gone, and its store: they know
                signal.compare_set("failed", "", text[:_REASON_LENGTH] or "no reason given")

    def close(self) -> None:
        """Leave the group. Members that still wait in it fail."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        self._store = self._signal = None

    def _open_store(self) -> dist.Store:
        if self._store is None:
            raise PeerFailed("the group for weight broadcasts was closed: sync again")
        return self._store

    def _look(self, keys: list[str]) -> list[bytes]:
        """Values of `keys`; raises PeerFailed where a member has failed."""
        with _lost("looking for its word"):
            *values, failed = self._open_store().multi_get([*keys, "failed"])
        if failed:
            raise PeerFailed(f"the weight broadcast was given up elsewhere: {bytes(failed).decode()}")
        return values

    def _wait_until(self, there: Callable[[], bool]) -> None:
        deadline, pause = time.monotonic() + PEER_LIMIT_S, 1e-4
        while not there():
            self._look([])
            if time.monotonic() > deadline:
                raise PeerFailed(f"a member of the weight broadcast said nothing for {PEER_LIMIT_S:g} s")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.02)


def send(
    channel: Channel, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]], copies: Copies | None = None
) -> int:
    """Send what `manifest` announced, nothing else, by `copies` as differences; return the bytes. Gathering the next
    bucket overlaps with loading the last one."""
    if copies is not None:
        copies.begin(manifest.follows)
    gathered = iter(tensors)
    largest = max((bucket.nbytes for bucket in manifest.buckets), default=0)
    buffer = torch.empty(largest, dtype=torch.uint8, device=channel.device if copies is None else "cpu")
    sent = 0
    for bucket in manifest.buckets:
        coming = _announced(bucket, gathered)
        if copies is None:
            message = [_filled(buffer, bucket, coming)]
        else:
            heads, nbytes = copies.pack(coming, buffer)
            message = [heads.view(torch.uint8).reshape(-1), buffer[:nbytes]]
        if bucket is manifest.buckets[-1]:  # what is wrong at the very end must show before the replicas are complete
            for name, _ in gathered:
                raise WeightSyncError(f"the trainer came with {name!r}, which it had not announced; sync again")
        for part in message:
            channel.broadcast(part.to(channel.device))
            sent += part.nbytes
    if copies is not None:
        copies.hold(manifest.token)
    return sent


def _announced(bucket: Bucket, gathered: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a bucket as they are gathered; WeightSyncError where one is not what was announced."""
    for entry in bucket.entries:
        name, tensor = next(gathered, ("nothing", torch.empty(0)))
        present = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        announced = (entry.name, entry.dtype, entry.shape)
        if present != announced:
            raise WeightSyncError(
                f"the trainer announced {announced} and came with {present}: postprocess_output_named_parameters "
                "must give the same each time; sync again"
            )
        yield name, tensor.detach()


def _filled(buffer: torch.Tensor, bucket: Bucket, tensors: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """Return the part of a buffer that a bucket takes, with its tensors in their places."""
    for entry, (_, tensor) in zip(bucket.entries, tensors, strict=True):
        view(buffer, entry).copy_(tensor)
    return buffer[: bucket.nbytes]


def receive(channel: Channel, bucket: Bucket, copies: Copies | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of one bucket, whose differences `copies` take. A buffer is theirs: layers hold on to
    tensors until they are complete."""
    if copies is not None:
        heads = torch.empty((len(bucket.entries), HEAD), dtype=torch.int64, device=channel.device)
        channel.broadcast(heads.view(torch.uint8).reshape(-1))
        heads = heads.cpu()
        data = torch.empty(message_bytes(bucket.entries, heads), dtype=torch.uint8, device=channel.device)
        channel.broadcast(data)
        yield from copies.unpack(bucket.entries, heads, data.cpu())
        return
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=channel.device)
    channel.broadcast(buffer)
    for entry in bucket.entries:
        yield entry.name, view(buffer, entry)


def _store(info: ChannelInfo, **options: Any) -> dist.TCPStore:
    limit = timedelta(seconds=CONNECT_LIMIT_S)
    return dist.TCPStore(info.host, info.port, info.world_size, timeout=limit, wait_for_workers=False, **options)


def _backend(info: ChannelInfo, store: dist.Store, rank: int, address: str) -> Any:
    """The one place where GPU and CPU differ."""
    limit = timedelta(seconds=PEER_LIMIT_S)
    if info.backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        # torch's watchdog would end the whole process when a peer dies; so the waiting thread gets the error instead
        with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_BLOCKING_WAIT="1"):
            return dist.ProcessGroupNCCL(store, rank, info.world_size, nccl)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = limit
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # it listens there, and goes with the group
    return dist.ProcessGroupGloo(store, rank, info.world_size, gloo)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _lost(doing: str) -> Iterator[None]:
    """Errors of store and group mean, as a rule, that a peer is gone: say so, with their words."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise PeerFailed(
            f"the weight broadcast broke off, its other side seems gone ({doing}: {str(error).splitlines()[0][:200]})"
        ) from error
