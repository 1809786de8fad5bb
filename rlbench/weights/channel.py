"""A group for broadcasts between one training rank and all replica workers: NCCL on GPUs, gloo on CPUs.

The members meet in a TCP store that the sender serves. Before each broadcast everybody says there that it is ready,
so that a broadcast itself never waits for a member that will not come: whoever fails says so in the store, whoever
waits looks for that, and a sender that dies takes the store with it. A group that saw a failure is never used again.

It is built on torch alone, not on vLLM's helpers: those would have to be imported on the training rank too, and their
groups wait without an end for a member that died.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlbench.errors import WeightSyncError
from rlbench.weights.manifest import ChannelInfo
from rlbench.weights.transport import PeerFailed

PEER_LIMIT_S = 300.0
"""How long to wait for a member that is alive and says nothing; a death shows at once."""
CONNECT_LIMIT_S = 60.0
_REASON_LENGTH = 600


class Channel:
    """One member's end. The sender makes it with `listen`, a receiver with `join`; then both `form` it, once.

    A sync is `begin`, one `broadcast` per bucket, in step on all members. Everything but `fail` belongs to one thread.

    Args:
        info: what the members know of each other.
        rank: 0 is the sender.
        device: of the buffers.
        store: connected.
        address: to bind to on this node.
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
        """The sender's end: serves the store on `host`, and only there.

        Raises:
            WeightSyncError: nothing can listen on `host`.
        """
        try:
            listener = socket.create_server((host, 0), backlog=max(16, world_size))
        except OSError as error:
            raise WeightSyncError(
                f"the sending rank cannot listen on {host} ({error.strerror}): the node's address must be its own"
            ) from error
        port = int(listener.getsockname()[1])
        store = dist.TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=CONNECT_LIMIT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        store.set("failed", "")
        store.set("go", "0")
        for rank in range(1, world_size):
            store.set(f"ready/{rank}", "0")
        info = ChannelInfo(secrets.token_hex(8), host, port, world_size, backend)
        return cls(info, 0, device, store, host)

    @classmethod
    def join(cls, info: ChannelInfo, rank: int, device: torch.device, address: str) -> Channel:
        """A receiver's end.

        Raises:
            PeerFailed: the sender's store does not answer.
        """
        with _lost("connecting to it"):
            # the sender listens before anybody is asked to join: refused means gone (TCPStore would try on and on)
            socket.create_connection((info.host, info.port), CONNECT_LIMIT_S).close()
            store = dist.TCPStore(
                info.host,
                info.port,
                info.world_size,
                is_master=False,
                timeout=timedelta(seconds=CONNECT_LIMIT_S),
                wait_for_workers=False,
            )
            return cls(info, rank, device, store, address)

    @property
    def open(self) -> bool:
        """True until `close`."""
        return self._store is not None

    def form(self) -> None:
        """Make the group, once all members are there; collective.

        Raises:
            PeerFailed: another member failed or did not come in time.
        """
        if self._group is not None:
            return
        self.begin()
        self.release()
        with _lost("forming the group"):
            store = dist.PrefixStore("group", self._open_store())
            self._group = _backend(self.info, store, self.rank, self._address)
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))  # NCCL connects in its first operation

    def begin(self) -> None:
        """Meet before a step. The sender returns once all receivers are there; a receiver once the sender let it go.

        Raises:
            PeerFailed: another member failed, died, or did not come in time.
        """
        self._step += 1
        if self.rank == 0:
            receivers = [f"ready/{rank}" for rank in range(1, self.info.world_size)]
            self._wait_until(lambda: min(map(int, self._look(receivers))) >= self._step)
        else:
            with _lost("meeting it"):
                self._open_store().set(f"ready/{self.rank}", str(self._step))
            self._wait_until(lambda: int(self._look(["go"])[0]) >= self._step)

    def release(self) -> None:
        """The sender: let the receivers that wait in `begin` go. A receiver has nobody to let go."""
        if self.rank == 0:
            self._open_store().set("go", str(self._step))

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Send or receive one buffer; the same size on all members.

        Raises:
            PeerFailed: another member failed, died, or did not come in time; the group is of no use any more.
        """
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
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, info.world_size, gloo)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _lost(doing: str) -> Iterator[None]:
    """Errors of store and group mean, as a rule, that a peer is gone: say so, with their words."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise PeerFailed(
            f"the weight broadcast broke off, its other side seems gone ({doing}: {str(error).splitlines()[0][:200]})"
        ) from error
