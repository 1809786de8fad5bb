"""Processes that stand for notebook kernels: they live as long as a test wants and run what it sends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOOP = """
import json, sys
names = {}
for line in sys.stdin:
    try:
        exec(json.loads(line), names)
        answer = {"out": names.pop("out", None)}
    except BaseException as error:
        answer = {"error": type(error).__name__, "said": str(error)}
    print("ANSWER" + json.dumps(answer), flush=True)
"""


class Refused(Exception):
    """What a kernel's cell raised: the error's name and text."""


class Kernel:
    """One process in a process session of its own, with its own state folder; `inside`: words before its command."""

    def __init__(self, state: Path, inside: Sequence[str] = (), **environ: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self._process = subprocess.Popen(
            [*inside, sys.executable, "-u", "-c", LOOP],
            env=kept | {"XDG_STATE_HOME": str(state)} | environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def send(self, cell: str) -> None:
        """Start a cell."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(cell) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What the cell sent last assigned to `out`; raises `Refused` with what it raised."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER"):
                found = json.loads(line.removeprefix("ANSWER"))
                if "error" in found:
                    raise Refused(f"{found['error']}: {found['said']}")
                return found["out"]
        raise AssertionError(f"the kernel ended with {self._process.wait()}")

    def run(self, cell: str) -> Any:
        """Run a cell to its end."""
        self.send(cell)
        return self.answer()

    def kill(self) -> None:
        """End its whole process group at once, as a dying Jupyter server does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """Let it end by itself."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=60)
