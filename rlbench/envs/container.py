"""Programs that the policy writes, each in a container of its own, by Docker or by Podman, which is called the same."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rlbench.envs.tools import LONGEST_RESULT
from rlbench.errors import DataError
from rlbench.units import GIB, format_bytes

CLIENTS = ("docker", "podman")
IMAGE = "python:3.12-slim"
FOLDER = "/sandbox"
"""Where a program runs: no image has files there. In /tmp it may, which Podman would copy."""
FOLDER_MIB, PROCESSES = 64, 64
START_S = 30.0
"""What a container may take to start and end, beside the program."""
LATE, KILLED = 124, 137
PRINTED_BYTES = 16 << 20
"""What a program may print; of that LONGEST_RESULT is kept."""
FIRST_PROCESS = f"""
import subprocess, sys
with open("main.py", "wb") as file:
    file.write(sys.stdin.buffer.read())
try:
    ended = subprocess.run([sys.executable, "-I", "main.py"], stdin=subprocess.DEVNULL, timeout=float(sys.argv[1]))
except subprocess.TimeoutExpired:
    sys.exit({LATE})
sys.exit(ended.returncode if ended.returncode >= 0 else 128 - ended.returncode)
"""
"""The container's first process, with which all others end: a program that is late ends with nobody outside watching,
and can neither end nor stop it."""
BOUNDS = (
    *("--rm", "--interactive", "--log-driver", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--user", "65534:65534", "--read-only", "--pids-limit", str(PROCESSES)),
    *("--tmpfs", f"{FOLDER}:rw,mode=1777,size={FOLDER_MIB}m", "--tmpfs", f"/tmp:rw,mode=1777,size={FOLDER_MIB}m"),
    *("--workdir", FOLDER, "--env", f"HOME={FOLDER}"),
)


@dataclass(frozen=True)
class Container:
    """What runs a program in a new container of `image`, by a `client` of `CLIENTS`; see `rlbench.envs.sandbox` for
    what that keeps from it."""

    client: str
    timeout_s: float
    memory_gib: float
    network: bool
    image: str
    arguments: tuple[str, ...] = ()

    def prepare(self) -> None:
        """Fetch the image where this host does not have it; DataError where that fails."""
        if _said([self.client, "image", "inspect", self.image])[0]:
            status, said = _said([self.client, "pull", self.image], seconds=None)
            if status:
                raise DataError(f"sandbox('docker'): {self.client} has no image {self.image!r}: {said[-300:]}")

    def __call__(self, code: str) -> str:
        """Return what the program printed, to both streams, and how it ended where that was not well."""
        name, memory = f"rlb-sandbox-{secrets.token_hex(6)}", f"{int(self.memory_gib * 1024)}m"
        bounds = [*BOUNDS, *f"--memory {memory} --memory-swap {memory}".split()]
        bounds += [] if self.network else ["--network", "none"]
        command = [self.client, "run", "--name", name, *bounds, *self.arguments, self.image]
        command += ["python3", "-I", "-c", FIRST_PROCESS, f"{self.timeout_s:g}"]
        with tempfile.TemporaryDirectory(prefix="rlb-sandbox-") as folder:  # Podman leaves files where it is called
            program = Path(folder) / "main.py"
            program.write_text(code, encoding="utf-8", errors="replace")
            with program.open("rb") as given:  # no pipe, which would wait for a container that does not begin to read
                text, status = self._run(command, name, given, folder)
        return "\n".join(filter(None, (text.rstrip("\n"), self._ended(status))))

    def _run(self, command: list[str], name: str, program: IO[bytes], folder: str) -> tuple[str, int | None]:
        """Run a container of this name; return what it printed, and its exit status, None where it had to be killed."""
        out, status = subprocess.PIPE, None
        process = subprocess.Popen(command, cwd=folder, stdin=program, stdout=out, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        try:
            text, whole = _read(process.stdout, self.timeout_s + START_S)
            if whole:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(START_S)
        finally:
            process.stdout.close()
            if status is None:
                process.kill()
                _said([self.client, "kill", name])
            process.wait()
        return text, status

    def _ended(self, status: int | None) -> str:
        if status is None:
            return "(it printed too much, or its container did not end, and was killed)"
        if status == KILLED:
            return f"(it was killed, as what takes more than {format_bytes(self.memory_gib * GIB)} of memory is)"
        if status == LATE:
            return f"(it was not over within {self.timeout_s:g} s and was killed)"
        return f"(it ended with status {status})" if status else ""


def client() -> str:
    """Return the first of `CLIENTS` that is installed and answers; DataError where none does."""
    answers = []
    for name in filter(shutil.which, CLIENTS):
        status, said = _said([name, "info", "--format", "{{.Host}}" if name == "podman" else "{{.ServerVersion}}"])
        if status == 0:
            return name
        answers.append(f"{name}: {said[-300:]}")
    why = "; ".join(answers) or f"neither {' nor '.join(CLIENTS)} is installed here"
    raise DataError(f"sandbox('docker'): {why}. 'process' needs none of them")


def _said(command: Sequence[str], seconds: float | None = START_S) -> tuple[int, str]:
    """Run a command of the client's; return its exit status and what it said. It fails where it takes longer."""
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(command, stdin=quiet, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return LATE, f"{' '.join(command)} did not answer within {START_S:g} s"
    return done.returncode, (done.stderr or done.stdout).strip()


def _read(stream: IO[bytes], seconds: float) -> tuple[str, bool]:
    """Read for so long, and up to PRINTED_BYTES; return the text's beginning, and whether the stream had its end."""
    deadline, kept, count = time.monotonic() + seconds, b"", 0
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while count < PRINTED_BYTES and selector.select(max(0.0, deadline - time.monotonic())):
            part = stream.read1(1 << 16)  # type: ignore[attr-defined]
            if not part:
                return kept.decode("utf-8", "replace"), True
            kept, count = (kept + part)[:LONGEST_RESULT], count + len(part)
    return kept.decode("utf-8", "replace"), False
