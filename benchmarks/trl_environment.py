"""TRL's environment: made once, on demand, below build/, with pinned versions and nothing of ours in it.

torch, transformers, accelerate and datasets are those of our own pins (constraints/), so that the libraries below
are the same on both sides.

    python -m benchmarks.trl_environment        # makes it, and prints its Python
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.turns import ROOT, SideError

TRL = "1.16.0"
SHARED = ("torch", "transformers", "accelerate", "datasets", "huggingface-hub", "numpy", "pyarrow")
"""Packages whose versions are ours."""


def python(engine: str = "cpu") -> str:
    """Return the Python of TRL's environment, making it first where it is not there."""
    pins = requirements(engine)
    folder = ROOT / "build" / "benchmarks" / f"trl-{TRL}-{engine}"
    stamp, interpreter = folder / "requirements.txt", folder / "bin" / "python"
    if stamp.exists() and stamp.read_text().split() == pins:
        return str(interpreter)
    print(f"making TRL's environment in {folder.relative_to(ROOT)}, once …", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.EnvBuilder(with_pip=True).create(folder)
    install = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins]
    failed = _failure(install, folder)
    if failed and engine == "cpu":  # where nothing configured carries torch's CPU builds
        from rlbench.setup.install import PYTORCH_CPU_INDEX

        failed = _failure([*install, "--extra-index-url", PYTORCH_CPU_INDEX], folder)
    if failed:
        raise SideError(f"TRL's environment could not be made: {failed}")
    stamp.write_text("\n".join(pins) + "\n")
    return str(interpreter)


def requirements(engine: str) -> list[str]:
    """Return the pins, one per package."""
    from rlbench.setup.plan import pinned_versions

    ours = pinned_versions(engine)
    pins = [f"trl=={TRL}", *(f"{name}=={ours[name]}" for name in SHARED if name in ours)]
    # a CPU build that lies on a configured index would sort above the CUDA build of the same version
    return [f"{pin},!={ours['torch']}+cpu" if engine == "gpu" and pin.startswith("torch==") else pin for pin in pins]


def _failure(command: list[str], folder: Path) -> str:
    """Run it; return the last line of its complaints, empty where it succeeded."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return (lines[-1] if lines else f"status {done.returncode}") if done.returncode else ""


if __name__ == "__main__":
    print(python())
