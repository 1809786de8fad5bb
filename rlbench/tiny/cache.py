"""Where the tiny models lie, and how one gets there: built aside, in a process of its own, then renamed.

Standard library alone: a kernel that finds the model in the cache imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlbench.errors import BuildError, DataError, nearest

NAMES = ("tiny", "bench-10m", "tiny-vision")
"""`tiny` and `tiny-vision` are warmed up on their task; `bench-10m` has ten million random parameters and serves
measurements."""
TEXT_RECIPE = ("tokenizer.py", "tasks.py", "warmup.py")
"""The files that make a model, the last of which is run."""
VISION_RECIPE = (*TEXT_RECIPE, "vision.py", "vision_model.py")


def cache_folder() -> Path:
    """Return the folder of all cached models, `$XDG_CACHE_HOME/rlbench/tiny`; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rlbench" / "tiny"


def ensure(
    name: str = "tiny",
    cache_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the folder of a tiny model ("tiny", "tiny-vision" or "bench-10m") in Hugging Face format, making it first
    if need be.

    Making "tiny" takes about half a minute on two cores, "tiny-vision" two; two processes that ask at once make
    it once. It is kept in `cache_dir`, `cache_folder()` unless given; each `seed` is another model; `on_progress` hears
    (steps done, steps in all).
    """
    if name not in NAMES:
        raise DataError(f"no tiny model {name!r}{nearest(name, NAMES)}. Known: {', '.join(NAMES)}.")
    files = VISION_RECIPE if name == "tiny-vision" else TEXT_RECIPE
    recipe = hashlib.sha256(b"".join((Path(__file__).parent / file).read_bytes() for file in files))
    folder = Path(cache_dir) if cache_dir is not None else cache_folder()
    target = folder / f"{name}-{seed}-{recipe.hexdigest()[:12]}"  # a changed recipe is a new entry
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it when its holder dies
        if target.is_dir():  # another process made it while this one waited
            return target
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=folder))
        try:
            _run_builder(Path(files[-1]).stem, [name, str(seed), str(aside)], on_progress)
            aside.chmod(0o755)  # mkdtemp gives 0700
            aside.rename(target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return target


def _run_builder(module: str, arguments: list[str], on_progress: Callable[[int, int], None] | None) -> None:
    """Run a module of this room, which prints "done total" lines, to its end."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", f"rlbench.tiny.{module}", *arguments]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints, env=environment, text=True
        ) as builder,
    ):
        assert builder.stdout is not None
        try:
            for line in builder.stdout:
                progress = re.fullmatch(r"(\d+) (\d+)\n", line)  # a library has words of its own, as DeepSpeed
                if progress is not None and on_progress is not None:
                    on_progress(int(progress[1]), int(progress[2]))
            status = builder.wait()
        finally:
            builder.kill()  # an interrupt leaves nothing behind
        if status != 0:
            complaints.seek(0)
            tail = complaints.read()[-2000:].strip()
            raise BuildError(f"making the model {arguments[0]!r} failed with status {status}:\n{tail}")
