"""Kernels of several ipykernel releases beside the installed one, for what differs between them.

ipykernel 6 knows no subshells; 7.0 to 7.3 answer a widget's message on the subshell that the page names; 7.4 on the
shell from which the widget last published. So a button during a busy cell behaves differently in each.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.browser.server import Lab

VERSIONS = ("6.31.0", "7.3.0", "7.4.0")


def offer(lab: Lab, folder: Path) -> dict[str, str]:
    """Give the lab one kernel per release, installed below `folder`; returns the kernels' names by version.

    Each is this environment with that ipykernel before the installed one, so it has rlbench and everything else.
    """
    return {version: _offer_one(lab, folder / version, version) for version in VERSIONS}


def _offer_one(lab: Lab, folder: Path, version: str) -> str:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*command, f"ipykernel=={version}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    name = f"ipykernel-{version}"
    lab.add_kernel(name, {"PYTHONPATH": str(folder)})
    return name
