"""What to install: the engine for this machine, its pins, and the digest that names the result."""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlbench.errors import RLBenchError

_WITHIN, _ROOT = Path(__file__).parent / "constraints", Path(__file__).parents[2] / "constraints"
PINS = _WITHIN if _WITHIN.is_dir() else _ROOT  # installed from a wheel, or a checkout
ENGINES = ("cpu", "gpu")
CHECKOUT_EXTRAS = ("lab", "dev")  # what a checkout has beside the engine: notebooks, tests, checks
OLDEST_PYTHON, FIRST_UNKNOWN_PYTHON = (3, 11), (3, 15)  # vLLM 0.32 says the same


class SetupError(RLBenchError):
    """The environment cannot be made; one line says what is missing."""


@dataclass(frozen=True)
class Plan:
    """One environment, as values: which engine, which requirements, under which pins."""

    engine: str
    requirements: tuple[str, ...]
    constraints: tuple[Path, ...]
    overrides: tuple[Path, ...] = ()
    apart: tuple[str, ...] = ()  # installed without their dependencies, after the rest

    def digest(self, inputs: Iterable[Path], python: tuple[int, int]) -> str:
        """Hash of all that decides the result: this plan, its files, `inputs` and the Python version."""
        hashed = hashlib.sha256(repr((self.engine, self.requirements, self.apart, python)).encode())
        for path in (*self.constraints, *self.overrides, *inputs):
            hashed.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return hashed.hexdigest()


def has_nvidia_gpu(driver: Path = Path("/proc/driver/nvidia/gpus")) -> bool:
    """True if the NVIDIA driver lists a GPU, through /proc or `nvidia-smi -L`."""
    if driver.is_dir() and any(driver.iterdir()):
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        listing = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False  # a driver that does not answer cannot run an engine either
    return listing.returncode == 0 and "GPU " in listing.stdout


def choose_engine(asked: str | None, nvidia: bool) -> str:
    """`cpu` or `gpu`: what was asked for, else what is there."""
    if asked:
        if asked not in ENGINES:
            raise SetupError(f"no engine is called {asked!r}; there are {' and '.join(ENGINES)}, or none to detect it")
        return asked
    return "gpu" if nvidia else "cpu"


def check_machine(python: tuple[int, int], system: str, machine: str) -> None:
    """Raise SetupError where no engine wheel exists for this Python or this machine."""
    if not OLDEST_PYTHON <= python < FIRST_UNKNOWN_PYTHON:
        raise SetupError(
            f"rlbench needs Python 3.11 to 3.14, this is {python[0]}.{python[1]}: install one and name it, "
            "`make PYTHON=python3.12 …`"
        )
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise SetupError(
            f"rlbench needs Linux on x86_64 or aarch64, this is {system} on {machine}: vLLM has no wheel here"
        )


def check_this_machine() -> None:
    """`check_machine` for the Python and machine this runs on."""
    check_machine(sys.version_info[:2], platform.system(), platform.machine())


def plan_checkout(engine: str, root: Path) -> Plan:
    """The environment of a checkout: rlbench, editable, with its engine, notebooks, tests and checks."""
    extras = ",".join((engine, *CHECKOUT_EXTRAS))
    itself = ("--reinstall-package", "rlbench", "--editable", f"{root}[{extras}]")
    return _plan(engine, itself, (PINS / "tools.txt",))


def plan_user(engine: str, declared: Iterable[str]) -> Plan:
    """The engine set for an environment where rlbench is installed already; `declared` is the package's own
    metadata.
    """
    return _plan(engine, tuple(extra_requirements(declared, engine)), ())


def _plan(engine: str, requirements: tuple[str, ...], more_pins: tuple[Path, ...]) -> Plan:
    pins = PINS / f"{engine}.txt"
    if engine == "gpu":
        return Plan(engine, requirements, (pins, *more_pins))
    vision = f"torchvision=={pinned_versions(pins.read_text())['torchvision']}"
    return Plan(engine, requirements, (pins, *more_pins), (PINS / "overrides-cpu.txt",), (vision,))


def extra_requirements(declared: Iterable[str], extra: str) -> list[str]:
    """Of `importlib.metadata.requires(...)` lines, those of one extra, without their marker."""
    marker = re.compile(r"extra\s*==\s*['\"]" + re.escape(extra) + r"['\"]$")
    split = [line.partition(";") for line in declared]
    return [requirement.strip() for requirement, _, marks in split if marker.search(marks.strip())]


def pinned_versions(text: str) -> Mapping[str, str]:
    """Package -> version for the `name==version` lines of a constraints file."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s,;#]+)", text, flags=re.MULTILINE))
