"""How ranks find each other and agree which call comes next: one TCP store, and the process group over it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from rlbench.strategies.internals import forget_shardings
from rlbench.strategies.memory.device import RankDevice
from rlbench.weights import facts
from rlbench.weights.gloo import share_devices

KEPT_MARKS = 32
GIVE_UP_S = 0.5
"""How often a rank that waits for the others' word of a call looks whether anybody still wants it."""


class RankGroup:
    """One rank's connection to the others; `host`: the address rank 0 listens on, only there, not on all interfaces."""

    def __init__(self, rank: int, world_size: int, host: str, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._server: dist.TCPStore | None = None
        self._marks: dist.Store | None = None
        self._marked: list[str] = []
        self._joined = False
        self._board: dist.Store | None = None
        self.failed = False  # the call that ran last, on this rank
        self._some_failed = False  # the call before, on some rank

    def serve(self) -> tuple[str, int] | None:
        """Start the store (rank 0) and return its address; None on other ranks."""
        if self.rank != 0:
            return None
        if self._server is None:
            listener = socket.create_server((self._host, 0), backlog=128)
            self._server = dist.TCPStore(
                self._host,
                int(listener.getsockname()[1]),
                self.world_size,
                is_master=True,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return self._host, self._server.port

    def join(self, master: tuple[str, int], device: RankDevice) -> None:
        """Connect to the store at `master` and form the process group; collective."""
        facts.keep_gloo_on(self._host)  # of this rank's own node
        store = self._server or dist.TCPStore(*master, self.world_size, is_master=False, timeout=self._timeout)
        self._marks = dist.PrefixStore("calls", store.clone())  # its own connection: a wait must not block collectives
        self._words = store.clone()  # and a third: words are left from a thread of their own
        share_devices()
        dist.init_process_group(
            store=dist.PrefixStore("group", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=self._timeout,
            **device.group_arguments(),
        )
        self._joined = True

    def board(self, call_id: str) -> dist.Store | None:
        """Where the ranks that run one call can leave word for each other; None for one rank. Not waited in."""
        if self._marks is None or self.world_size == 1:
            return None
        self._board = dist.PrefixStore(f"boards/{call_id}", self._words)
        return self._board

    def forget_board(self) -> None:
        """Take this rank's word off the last board: its call is over on all ranks, as they are at the next one."""
        board, self._board = self._board, None
        if board is not None:
            board.delete_key(str(self.rank))

    def register(self, epoch: int, seq: int, timeout_s: float, given_up: Callable[[], bool]) -> bool:
        """Mark call (epoch, seq) and wait for all ranks' marks, which say whether the rank failed in the call before.
        The first rank to decide decides for all: by seeing all, by running out of time, or as nobody wants the call any
        more (`given_up`), another rank having died, say. True before the ranks have joined."""
        if self._marks is None or self.world_size == 1:
            return True
        call = f"{epoch}/{seq}"
        self._marks.set(f"{call}/{self.rank}", "failed" if self.failed else "well")
        marks = [f"{call}/{rank}" for rank in range(self.world_size)]
        try:
            self._some_failed |= b"failed" in self._words_of(marks, timeout_s, given_up)
            own = "go"
        except dist.DistStoreError:
            own = "drop"
        verdict = bytes(self._marks.compare_set(f"{call}/verdict", "", own))
        self._marked.append(call)
        while len(self._marked) > KEPT_MARKS:  # marks of calls long past are of no use
            old = self._marked.pop(0)
            self._marks.delete_key(f"{old}/{self.rank}")
            if self.rank == 0:
                self._marks.delete_key(f"{old}/verdict")
        self.failed &= verdict != b"go"  # a call that was dropped ran nowhere
        return verdict == b"go"

    def _words_of(self, marks: list[str], timeout_s: float, given_up: Callable[[], bool]) -> list[bytes]:
        """Return what the marks say once all are there; DistStoreError if they are not in time, or it was given up."""
        assert self._marks is not None
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                self._marks.set_timeout(timedelta(seconds=max(0.001, min(GIVE_UP_S, left))))
                return list(map(bytes, self._marks.multi_get(marks)))  # which waits for them
            except dist.DistStoreError:
                if left <= GIVE_UP_S or given_up():
                    raise

    def take_failure(self) -> bool:
        """Whether some rank failed in the call before this one; said once."""
        failed, self._some_failed = self._some_failed, False
        return failed

    def close(self) -> None:
        """Leave the group."""
        if self._joined:
            dist.destroy_process_group()
            forget_shardings()
            self._joined = False
        self._marks = self._server = None
