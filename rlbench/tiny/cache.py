"""Where the tiny models lie, and how one gets there: built aside, in a process of its own, then renamed.

Standard library alone: a kernel that finds the model in the cache imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rlbench.errors import BuildError, DataError, nearest

NAMES = ("tiny", "bench-10m")
"""`tiny` is warmed up on the task; `bench-10m` has ten million random parameters and serves measurements."""
RECIPE_FILES = ("model.py", "tokenizer.py", "tasks.py", "warmup.py")


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
    """Return the folder of a tiny model ("tiny" or "bench-10m") in Hugging Face format, making it first if need be.

    Making "tiny" takes about half a minute on two cores; two processes that ask at once make it once. It is kept in
    `cache_dir`, `cache_folder()` unless given; each `seed` is another model; `on_progress` hears (steps done, steps in
    all).
    """
    if name not in NAMES:
        raise DataError(f"no tiny model {name!r}{nearest(name, NAMES)}. Known: {', '.join(NAMES)}.")
    folder = Path(cache_dir) if cache_dir is not None else cache_folder()
    target = folder / f"{name}-{seed}-{recipe_key()}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{target.name}.lock"):
        if not target.is_dir():  # else another process made it while this one waited
            _make(name, seed, target, on_progress)
    return target


def recipe_key() -> str:
    """Return a short hash of the files that define the models: a changed recipe is a new cache entry."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for name in RECIPE_FILES:
        digest.update((here / name).read_bytes())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the system lets go of it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(name: str, seed: int, target: Path, on_progress: Callable[[int, int], None] | None) -> None:
    """Build the model in a process of its own and publish it as `target`."""
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _run_builder([name, str(seed), str(aside)], on_progress)
        aside.chmod(0o755)  # mkdtemp gives 0700
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _run_builder(arguments: list[str], on_progress: Callable[[int, int], None] | None) -> None:
    """Run `rlbench.tiny.warmup`, which prints "done total" lines, to its end."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryFile("w+") as complaints:
        builder = subprocess.Popen(
            [sys.executable, "-m", "rlbench.tiny.warmup", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=environment,
            text=True,
        )
        try:
            assert builder.stdout is not None
            for line in builder.stdout:
                done, total = map(int, line.split())
                if on_progress is not None:
                    on_progress(done, total)
            status = builder.wait()
        finally:
            builder.kill()  # an interrupt leaves nothing behind
            builder.wait()
        if status != 0:
            complaints.seek(0)
            tail = complaints.read()[-2000:].strip()
            raise BuildError(f"making the model {arguments[0]!r} failed with status {status}:\n{tail}")
