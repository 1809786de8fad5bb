"""Programs that the policy writes, run apart: a tool `python` whose calls are processes, containers or cloud sandboxes,
each of which can be killed."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbench.envs.cloud_sandbox import CloudSandbox
from rlbench.envs.container import IMAGE, Container, client
from rlbench.envs.protocol import Turn
from rlbench.envs.tools import LONGEST_RESULT, Parser, ToolEnv, find_calls
from rlbench.errors import DataError

KINDS = {
    "process": ("memory_gib",),
    "docker": ("memory_gib", "image", "arguments"),
    "e2b": ("template",),
}
"""Each with the options that not all have."""
MEMORY_GIB = 1.0
NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
LIMITS = """
import os, resource, sys
memory, seconds, size = map(int, sys.argv[1:])
for what, most in (("DATA", memory), ("CPU", seconds), ("FSIZE", size), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (most, most))
os.execv(sys.executable, [sys.executable, "-I", "main.py"])
"""
FILE_BYTES = 16 << 20


def sandbox(
    kind: str = "process",
    *,
    timeout_s: float = 10.0,
    memory_gib: float | None = None,
    network: bool = False,
    image: str | None = None,
    arguments: Sequence[str] = (),
    template: str | None = None,
    parser: Parser | None = None,
    reward: Callable[[Turn], float | None] | None = None,
    role: str | None = "tool",
) -> SandboxEnv:
    """Make an environment with a tool `python`, which runs a program and answers with what it printed.

        rollouts = session.rollout(chats, n=8, env=rb.envs.sandbox("process"), stop=["</tool>"], max_tokens=256)

    `"process"`: each call is a process of its own, by Linux's namespaces: without a network, with an empty environment
    (no keys), in an empty folder that is removed, with bounded memory, processor time and files, and killed with all it
    started when it is over or takes too long. It is **not** kept from reading what your user may read on the machine,
    nor from writing there: the policy's programs are mistakes to survive, not attackers.

    `"docker"`: each call is a container of its own, by Docker or Podman on the hosts of the replicas: what it sees of
    files is the image, read only, and in memory an empty folder and /tmp, of 64 MiB each; it has no network, no
    capabilities and no user of the host's, at most 64 processes and the memory given, and ends with all it started. It
    shares the host's kernel, as every container does: a program that breaks that breaks out.

    `"e2b"`: each call is a new sandbox of E2B's cloud (`pip install 'rlbench[e2b]'`), a virtual machine of which
    nothing is on your hosts, killed with the call, and by E2B where the replica cannot. The replicas' processes call
    E2B, with `E2B_API_KEY` (and `E2B_DOMAIN`, for an E2B of your own) of the environment that the cluster was started
    with: set it before the first session. The key goes to E2B alone, not with the environment nor into rollouts.
    Programs leave your machines, up to 32 of a replica at a time, and E2B bills for them. What E2B itself fails at (no
    answer, no room, a sandbox that is gone) is not told to the policy: the sample is aborted, and `rollouts.env_errors`
    has why.

    Args:
        kind: `"process"`, `"docker"` or `"e2b"`.
        timeout_s: seconds a program may take, without the start of a container or sandbox.
        memory_gib: GiB of memory each of its processes may allocate; of a container, all of them together; default 1.
            In E2B it is the template's.
        network: True gives a program the network. As a process it goes without namespaces then, for hosts that refuse
            them: what it detaches from itself outlives it.
        image: of a container, with `python3` in it, fetched where it is not there; default `"python:3.12-slim"`.
        arguments: further ones of `docker run`: `("--runtime=runsc",)`.
        template: of an E2B sandbox, with `python3` in it: its name or id; default E2B's `"base"`.
        parser, reward, role: as of `rb.envs.tools`.
    """
    if kind not in KINDS:
        raise DataError(f"sandbox({kind!r}): there are {', '.join(KINDS)}; for a server of your own see rb.envs.mcp")
    own = {"memory_gib": memory_gib, "image": image, "arguments": tuple(arguments) or None, "template": template}
    if wrong := [name for name, value in own.items() if value is not None and name not in KINDS[kind]]:
        raise DataError(f"sandbox({kind!r}): {wrong[0]} would have no effect; it takes {', '.join(KINDS[kind])}")
    memory = MEMORY_GIB if memory_gib is None else memory_gib
    if not timeout_s > 0 or not memory > 0:
        raise DataError(f"sandbox(timeout_s={timeout_s}, memory_gib={memory_gib}): wanted numbers above 0")
    runs: Callable[[str], str]
    if kind == "e2b":
        runs = CloudSandbox(template, timeout_s, network)
    elif kind == "docker":
        runs = container = Container(client(), timeout_s, memory, network, image or IMAGE, tuple(arguments))
        container.prepare()
    else:
        runs = Program(timeout_s, memory, network)
    _check(kind, runs)
    return SandboxEnv({"python": runs}, parser or find_calls, reward, role)


def _check(kind: str, runs: Callable[[str], str]) -> None:
    """Run a program; DataError where it does not print what it should."""
    try:
        said = runs("print(6 * 7)")
    except OSError as error:  # there is no `unshare`
        said = str(error)
    if said == "42":
        return
    if kind == "e2b":
        raise DataError(f"sandbox('e2b'): its template runs no program ({said[:300]}); template= has to have python3")
    mend = "network=True goes without that" if kind == "process" else "arguments=(…) are added to `docker run`"
    raise DataError(f"sandbox({kind!r}): this host lets no program be set apart ({said[:300]}); {mend}")


class SandboxEnv(ToolEnv):
    """See `sandbox`. `tools`: its tool in OpenAI's form, for `tools=` of a rollout."""

    def __repr__(self) -> str:
        return f"sandbox({self.functions['python']})"

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tool `python`, in OpenAI's form."""
        code = {"type": "string", "description": "The program."}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        told = "Run a Python program. Returns what it prints."
        return [{"type": "function", "function": {"name": "python", "description": told, "parameters": parameters}}]


@dataclass(frozen=True)
class Program:
    """What runs a program apart; see `sandbox` for what that keeps from it."""

    timeout_s: float
    memory_gib: float
    network: bool

    def __call__(self, code: str) -> str:
        """Return what the program printed, to both streams, and how it ended where that was not well."""
        limits = [int(self.memory_gib * 2**30), math.ceil(self.timeout_s) + 1, FILE_BYTES]
        command = [*(() if self.network else NAMESPACES), sys.executable, "-I", "-c", LIMITS, *map(str, limits)]
        with tempfile.TemporaryDirectory(prefix="rlb-sandbox-") as folder, tempfile.TemporaryFile() as printed:
            (Path(folder) / "main.py").write_text(code, encoding="utf-8", errors="replace")
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )
            try:
                status = process.wait(self.timeout_s)
                ended = f"(it ended with status {status})" if status else ""
            except subprocess.TimeoutExpired:
                ended = f"(it was not over within {self.timeout_s:g} s and was killed)"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            printed.seek(0)
            text = printed.read(LONGEST_RESULT).decode("utf-8", "replace").rstrip("\n")
        return "\n".join(filter(None, (text, ended)))
