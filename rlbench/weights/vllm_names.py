"""Names of what the processes of a tensor parallel replica share in memory.

They are there to be opened by; once all have, they are taken away, and the memory ends with its last process, however
that ends. Python and vLLM take them away at the orderly end of the process that made them, which a worker of Ray hardly
has: Ray kills what it started, the process that would tidy up behind it too.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Collection
from multiprocessing import util
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, ShmRingBuffer


def named_locks() -> frozenset[Any]:
    """Return the locks of this process that other processes can open by a name now, by their keys in Python's registry
    of what it does at its end."""
    registry = util._finalizer_registry  # type: ignore[attr-defined]
    return frozenset(key for key, held in registry.items() if held._callback is SemLock._cleanup)  # type: ignore[attr-defined]


def unname_shared_memory(*queues: MessageQueue, but: Collection[Any] = ()) -> None:
    """Take their names from the queues and locks that this process made, and from what its vLLM kernels share; to be
    called in each process of the replica, when all of them are built.

    Args:
        queues: those that vLLM has put out of sight of the garbage collector.
        but: locks that keep theirs, of `named_locks`: they were there before the replica, and are another's.
    """
    seen = (held for held in gc.get_objects() if type(held) is ShmRingBuffer)
    for buffer in {id(each): each for each in (*seen, *(queue.buffer for queue in queues))}.values():
        if buffer.is_creator:
            buffer.shared_memory.unlink()
            buffer.is_creator = False
    for key in named_locks().difference(but):
        util._finalizer_registry[key]()  # type: ignore[attr-defined]
    if "VLLM_DIST_IDENT" in os.environ:  # of the CPU build
        for file in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*"):
            file.unlink(missing_ok=True)  # each of the workers is asked
