"""The allocator of workers' host memory: jemalloc, as Ray brings it along, loaded before anything of theirs.

Torch asks for its tensors aligned to 64 bytes. glibc before 2.38 seldom gives the place of a freed aligned block to
whoever asks for the next one (its bug 14581), so that a step's tensors take half as much again of a process's memory,
with holes that differ from run to run.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
from pathlib import Path

LIBRARY = "core/libjemalloc.so"
"""Where the package `ray` has it."""
SETTINGS = {
    "MALLOC_CONF": "narenas:1,oversize_threshold:0,lg_extent_max_active_fit:12,dirty_decay_ms:-1,muzzy_decay_ms:0"
}
"""One heap for all threads, large blocks among the others, of which any place is given to whoever asks, and which keeps
what is freed until it is asked for its free pages: a step's memory is the next step's, and a page that the system gives
anew costs its zeros."""
PAGE_BYTES = 4096
"""The largest page of a system that Ray's build of it runs on."""
WHY_NOT = f"Ray has no {LIBRARY}, its path has a blank or a colon in it, or pages are larger than {PAGE_BYTES} bytes"


def library() -> Path | None:
    """Return the library, or None where Ray has none, or none for this machine."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None or mmap.PAGESIZE > PAGE_BYTES:
        return None
    path = Path(spec.origin).parent / LIBRARY
    listed = not set(" :") & set(str(path))  # by which the dynamic linker would take it apart
    return path if listed and path.is_file() else None


def environment() -> dict[str, str]:
    """Return what a process is to be started with so that it allocates by jemalloc; nothing where there is none.

    What this process's environment has already stands: a library before ours that has `malloc` is the one that is
    used, and settings that somebody chose are kept.
    """
    path = library()
    if path is None:
        return {}
    preloaded = [*filter(None, [os.environ.get("LD_PRELOAD")]), str(path)]
    return {name: os.environ.get(name, value) for name, value in SETTINGS.items()} | {"LD_PRELOAD": ":".join(preloaded)}
