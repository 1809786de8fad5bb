"""Build the JupyterLab side panel from `extension/`; `make lab`, `make lint` and the wheel's build hook use this.

    python scripts/panel.py         build what is out of date, and show it to this environment's JupyterLab
    python scripts/panel.py lint    TypeScript's types, eslint, prettier, unless nothing has changed since all passed
    python scripts/panel.py test    the unit tests beside the TypeScript

Node and the network are needed for building alone. Without node everything else works, and one line says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlbench.setup.plan import SetupError

NAME = "rlbench-lab"
OLDEST_NODE = (20, 19)  # of the bundler
STAMP = "sources.sha256"
SOURCES = "package.json yarn.lock tsconfig.json tsconfig.build.json install.json schema src style".split()
LEFT_BEHIND = ("node_modules", "lib", ".yarn")  # in `extension/`: no sources
WIDGETS = Path("rlbench", "notebook", "static")  # built of `extension/` too, and committed
LINTED = Path("build", "panel-lint.sha256")
TASKS = {"lint": "check", "test": "test"}
# JupyterLab's own yarn and builder lie beside this Python.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def output(root: Path) -> Path:
    """Return where the built panel lies in a checkout or source archive."""
    return root / "rlbench" / "labextension"


def sources_digest(root: Path) -> str:
    """Hash all that decides what is built, names included."""
    files = [path for name in SOURCES for path in _files(root / "extension" / name)]
    return _digest(root, [path for path in files if not path.name.endswith((".test.ts", ".test.tsx"))])


def lint_digest(root: Path) -> str:
    """Hash all that decides whether the lint passes: sources, their tests, each tool's options, what is built of them.

    One digest, and not eslint's cache of each file: its rules read types, which come from other files.
    """
    folders = [path for path in sorted((root / "extension").iterdir()) if path.name not in LEFT_BEHIND]
    return _digest(root, [path for place in (*folders, root / WIDGETS) for path in _files(place)])


def _files(place: Path) -> list[Path]:
    return [path for path in (sorted(place.rglob("*")) if place.is_dir() else [place]) if path.is_file()]


def _digest(root: Path, paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_built(root: Path) -> bool:
    """Tell whether the built panel is that of the sources there are."""
    stamp = output(root) / STAMP
    return stamp.is_file() and stamp.read_text().strip() == sources_digest(root)


def why_no_node() -> str:
    """Return what is missing for building, as part of a sentence; empty where nothing is."""
    node = shutil.which("node", path=PATH)
    if node is None:
        return "node was not found"
    version = subprocess.run([node, "--version"], capture_output=True, text=True).stdout.strip()
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_NODE:
        return f"node {version or '?'} is older than {OLDEST_NODE[0]}.{OLDEST_NODE[1]}"
    return ""


def build(root: Path) -> None:
    """Build the panel of `root` anew. Raises SetupError with what the failing tool said last."""
    with _alone(root):
        if is_built(root):  # another run finished it while this one waited
            return
        _install_modules(root)
        shutil.rmtree(output(root), ignore_errors=True)  # the names of older chunks are others
        shutil.rmtree(root / "extension" / "lib", ignore_errors=True)
        _jlpm(root, "build")
        shutil.copy(root / "extension" / "install.json", output(root))
        (output(root) / STAMP).write_text(sources_digest(root) + "\n")


def lint(root: Path) -> None:
    """Lint the panel of `root`, unless all that decides it is as it was when it last passed. Raises SetupError."""
    digest, stamp = lint_digest(root), root / LINTED
    if stamp.is_file() and stamp.read_text().strip() == digest:
        print("rlbench: the side panel is as it was when its lint passed", file=sys.stderr)
        return
    _run(root, "lint")
    stamp.parent.mkdir(exist_ok=True)
    stamp.write_text(digest + "\n")  # of before: what changed meanwhile is linted next time


def link(root: Path, prefix: Path) -> None:
    """Let the JupyterLab of the environment at `prefix` find the panel that is built in this checkout."""
    place = prefix / "share" / "jupyter" / "labextensions" / NAME
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        place.unlink()
    elif place.is_dir():  # of a wheel that was installed here before
        shutil.rmtree(place)
    place.symlink_to(output(root), target_is_directory=True)


def main(arguments: Sequence[str]) -> int:
    """Build and show the panel, or `lint` or `test` it."""
    root = Path(__file__).resolve().parents[1]
    missing = why_no_node()
    try:
        if missing and (arguments or not is_built(root)):
            print(f"rlbench: {missing}: no side panel in JupyterLab, everything else works", file=sys.stderr)
        elif arguments == ["lint"]:
            lint(root)
        elif arguments:
            _run(root, arguments[0])
        else:
            if not is_built(root):
                print("rlbench: building the side panel …", file=sys.stderr, flush=True)
                build(root)
            link(root, Path(sys.prefix))
    except SetupError as error:
        print(f"rlbench: {error}", file=sys.stderr)
        return 1
    return 0


def _run(root: Path, task: str) -> None:
    """Run one of `TASKS`, its output shown."""
    with _alone(root):
        _install_modules(root)
    _jlpm(root, TASKS[task], shown=True)


def _install_modules(root: Path) -> None:
    """Install what yarn.lock names, where that was not done yet."""
    lock, state = root / "extension" / "yarn.lock", root / "extension" / "node_modules" / ".rlbench-lock"
    if not state.is_file() or state.read_bytes() != lock.read_bytes():
        _jlpm(root, "install", "--immutable")
        shutil.copy(lock, state)


def _jlpm(root: Path, *arguments: str, shown: bool = False) -> None:
    """Run JupyterLab's own yarn in the extension's folder."""
    jlpm = shutil.which("jlpm", path=PATH)
    if jlpm is None:
        raise SetupError("jlpm was not found: it comes with jupyterlab and with jupyter-builder")
    done = subprocess.run(
        [jlpm, *arguments],
        cwd=root / "extension",
        env={**os.environ, "PATH": PATH},
        text=True,
        stdout=None if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
    )
    if done.returncode:
        last = "" if shown else ":\n" + "\n".join(done.stdout.splitlines()[-30:])
        raise SetupError(f"jlpm {' '.join(arguments)} failed{last}")


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Hold the lock of one build at a time; it is a source file, so that nothing is left behind."""
    with open(root / "extension" / "package.json", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
