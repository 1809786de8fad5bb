"""What runs in a process of its own: reads pickled payloads from its input, writes answers as JSON, in frames."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import resource
import signal
import struct
from typing import IO, Any

from rlbench.rewards.kinds import Failure

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the input ends."""
    die_with(os.getppid())
    source, sink = private_streams()
    opening = pickle.loads(_frame(source) or b"")
    gc.disable()  # while it imports: there is little garbage then
    try:
        job = pickle.loads(opening["job"])
        getattr(job, "prepare", lambda: None)()
    except BaseException as error:  # whatever importing a user's module raises is told the parent
        _answer(sink, {"broken": Failure.of(error).plain()})
        return
    gc.freeze()
    gc.enable()
    if opening["memory_gib"] is not None:
        limit_memory(opening["memory_gib"])
    _answer(sink, {"ready": True})
    while (frame := _frame(source)) is not None:
        _answer(sink, job(pickle.loads(frame)))


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, however that dies (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def private_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Input and output under new numbers; to the reward's code standard input is empty, and what it prints is a log."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return source, sink


def limit_memory(gib: float) -> None:
    """Let allocations beyond `gib` GiB more than there are now fail."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        allocated = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    limit = allocated + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _frame(source: IO[bytes]) -> bytes | None:
    head = source.read(8)
    if len(head) < 8:
        return None
    return source.read(struct.unpack("<Q", head)[0])


def _answer(sink: IO[bytes], value: Any) -> None:
    content = json.dumps(value).encode("ascii")
    sink.write(struct.pack("<Q", len(content)) + content)
    sink.flush()


if __name__ == "__main__":
    main()
