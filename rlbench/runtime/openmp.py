"""The threads that workers compute with: those of Intel's OpenMP runtime, where the environment has it.

A thread that waits for the next parallel region spins for a millisecond, giving way to whoever wants its core, and
sleeps from then on. That of GNU, which torch brings along, sleeps at once or spins without giving way: the one makes a
small model's step a fifth longer, the other three times as long where two sessions share the cores.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

SETTINGS = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "1", "KMP_AFFINITY": "none"}
"""What the runtimes read when they begin: GNU's sleeps at once, Intel's after a millisecond; Intel's binds no threads
to cores: it would bind a fork of a process that it began in to one."""
LIBRARY = "lib/libiomp5.so"
"""Where the package `intel-openmp`, which vLLM for a host depends on, puts it."""
NOTES = Path("/dev/shm")


def environment() -> dict[str, str]:
    """Return the settings as this process's environment has them; those that it lacks are ours."""
    return {name: os.environ.get(name, value) for name, value in SETTINGS.items()}


def load() -> bool:
    """Load Intel's runtime in the place of the one that torch would load; return whether the environment has it.

    Raises:
        RuntimeError: torch is loaded already, and goes on with its own.
    """
    library = Path(sys.prefix) / LIBRARY
    if not library.is_file():
        return False
    if "torch" in sys.modules:
        raise RuntimeError(f"{library} is to be loaded before torch is, which computes with another runtime already")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return True


def leave_no_notes() -> None:
    """Remove, of this process and of all its forks, the file in shared memory by which the runtime would see that a
    process has loaded it twice: it would stay where that is killed or becomes another program. To be called once torch
    is loaded, whose own work in a fork has the runtime begin there."""
    _drop_note()
    os.register_at_fork(after_in_child=_drop_note)


def _drop_note() -> None:
    (NOTES / f"__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink(missing_ok=True)
