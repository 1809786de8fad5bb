"""Several machines on one: namespaces on a bridge, each with an address, a host name, a /dev/shm and processes of its
own, in which Ray's nodes and a driver run. Needs root and Debian's iproute2.

Of a test run that is killed nothing stays but a bridge and an empty folder, which the next one removes: a node's first
process dies with the run, and its others with that.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.clock import until
from tests.runtime.kernels import Kernel

PORT = 6379
HEALTH = {
    f"RAY_health_check_{name}": str(value)
    for name, value in {"initial_delay_ms": 2000, "period_ms": 1000, "timeout_ms": 3000, "failure_threshold": 3}.items()
}
"""How soon the head takes a node that does not answer for dead: Ray's own limits are a minute."""
OWN = ["--net", "--mount", "--uts", "--ipc", "--pid"]
FIRST = ["setpriv", "--pdeathsig", "KILL", "unshare", *OWN, "--fork", "--kill-child", "--mount-proc"]
"""Starts a node's first process, which ends when this one does; `bash` waits for those whose parents are gone."""


def refused() -> str | None:
    """Return why nodes cannot be had here; None where they can."""
    if missing := [tool for tool in ("ip", "setpriv", "unshare", "nsenter") if shutil.which(tool) is None]:
        return f"needs iproute2 and util-linux: there is no {missing[0]}"
    link = "ip link add rbtry0 type veth peer name rbtry1"  # also in a container that is root only by name
    made = subprocess.run([*FIRST, "sh", "-ec", link], capture_output=True, text=True, check=False)
    return f"network namespaces are not allowed here: {made.stderr.strip()}" if made.returncode else None


class Nodes:
    """Nodes of a Ray cluster; number 0 is the head, in which drivers run. `folder`: what all see of one another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.addresses: list[str] = []
        self._holders: list[subprocess.Popen[bytes]] = []
        self._firsts: list[int] = []
        self._rays: list[subprocess.Popen[bytes]] = []
        self._net = f"10.{77 + os.getpid() // 250 % 100}.{os.getpid() % 250}"
        self._bridge = f"rb{os.getpid():x}"
        self._temp = Path(f"/tmp/rlbn-{os.getpid():x}")  # each node mounts its own there
        _sweep()
        self._temp.mkdir()
        self._ip("link", "add", self._bridge, "type", "bridge")
        self._ip("link", "set", self._bridge, "up")

    @property
    def address(self) -> str:
        """What `rb.init` is given."""
        return f"{self.addresses[0]}:{PORT}"

    def add(self, cpus: int) -> None:
        """Start a further node."""
        i = len(self.addresses)
        self.addresses.append(f"{self._net}.{i + 1}")
        self._begin_namespaces()
        outer, inner = self._cable(i), f"w{os.getpid():x}-{i}"
        self._ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        self._ip("link", "set", outer, "master", self._bridge)
        self._ip("link", "set", outer, "up")
        self._ip("link", "set", inner, "netns", str(self._firsts[i]))
        self._run(
            i,
            f"mount -t tmpfs tmpfs {self._temp}",
            "mount -t tmpfs -o size=2g tmpfs /dev/shm",
            f"hostname node{i}",
            "ip link set lo up",
            f"ip addr add {self.addresses[i]}/24 dev {inner}",
            f"ip link set {inner} up",
        )
        self._rays.append(self._started_ray(i, cpus))
        if i == 0:
            until(lambda: self._run(0, f"exec 3<>/dev/tcp/{self.addresses[0]}/{PORT}", check=False) == 0)

    def inside(self, i: int) -> list[str]:
        """Return the words that run a command on node `i`."""
        return ["nsenter", "-t", str(self._firsts[i]), *OWN, "--"]

    def environment(self) -> dict[str, str]:
        """Return the environment of all processes of the cluster."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "JPY_"))}
        own = {"XDG_STATE_HOME": str(self.folder), "PYTHONPATH": str(Path(__file__).parent.parent)}
        return kept | own | HEALTH | {"RAY_enable_metrics_collection": "0"}

    def driver(self) -> Kernel:
        """Start a driver on the head node."""
        return Kernel(self.folder, self.inside(0))

    def cut_off(self, i: int) -> None:
        """Let no packet to or from node `i` through; its processes live."""
        self._ip("link", "set", self._cable(i), "down")

    def kill(self, i: int) -> None:
        """End all processes of node `i` at once."""
        os.kill(self._firsts[i], signal.SIGKILL)

    def close(self) -> None:
        """End all of it."""
        for first in self._firsts:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
        for process in [*self._holders, *self._rays]:
            process.kill()
            process.wait(20)
        # of connections that nobody closed a cut cable lives on for minutes
        for link in [*map(self._cable, range(len(self.addresses))), self._bridge]:
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
        self._temp.rmdir()

    def _cable(self, i: int) -> str:
        return f"v{os.getpid():x}-{i}"

    def _begin_namespaces(self) -> None:
        holder = subprocess.Popen([*FIRST, "bash", "-c", "sleep infinity & wait"], start_new_session=True)
        self._holders.append(holder)
        until(lambda: [one for one in psutil.Process(holder.pid).children() if one.name() == "bash"])
        self._firsts.append(psutil.Process(holder.pid).children()[0].pid)

    def _started_ray(self, i: int, cpus: int) -> subprocess.Popen[bytes]:
        flags = [f"--node-ip-address={self.addresses[i]}", f"--num-cpus={cpus}", f"--object-store-memory={128 << 20}"]
        flags += ["--block", "--memory=1073741824", "--include-log-monitor=false", "--dashboard-agent-listen-port=0"]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self._temp}"]
        flags += ["--disable-usage-stats", *(head if i == 0 else [f"--address={self.address}"])]
        words = [*self.inside(i), sys.executable, "-m", "ray.scripts.scripts", "start", *flags]
        with (self.folder / f"ray-{i}.log").open("wb") as log:
            return subprocess.Popen(words, env=self.environment(), start_new_session=True, stdout=log, stderr=log)

    def _run(self, i: int, *lines: str, check: bool = True) -> int:
        words = [*self.inside(i), "bash", "-ec", "\n".join(lines)]
        return subprocess.run(words, check=check, capture_output=True).returncode

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


def _sweep() -> None:
    """Remove what test runs have left that were killed."""
    for folder in Path("/tmp").glob("rlbn-*"):
        if not psutil.pid_exists(int(folder.name.removeprefix("rlbn-"), 16)):
            folder.rmdir()
    for name in psutil.net_if_addrs():
        own = re.fullmatch(r"rb([0-9a-f]+)|v([0-9a-f]+)-\d+", name)
        if own is not None and not psutil.pid_exists(int(own[1] or own[2], 16)):
            subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)


@contextlib.contextmanager
def nodes(cpus: Sequence[int], folder: Path) -> Iterator[Nodes]:
    """Run a cluster of so many CPUs on each node."""
    made = Nodes(folder)
    try:
        for count in cpus:
            made.add(count)
        yield made
    finally:
        made.close()
