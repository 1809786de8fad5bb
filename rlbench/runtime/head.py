"""Ray's head node: how it is started, so that it is reached from this machine alone and runs only what sessions use.

Ray makes its folders 0777 and its sockets and logs readable, so all of it lies in a folder that nobody else can enter.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlbench.runtime import allocator, openmp, registry, worker_start

ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Keeps Ray from replacing 127.0.0.1 by the outer address and listening there; read when ray is imported."""
SOCKET_PATH = 107  # how long the path of a unix socket may be
SOCKET_BELOW = len("/rlb-12345678/ray/session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store")
FLAGS = (
    "--head --block --node-ip-address=127.0.0.1 --include-dashboard=false --include-log-monitor=false --no-monitor "
    "--disable-usage-stats --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0"
)
RAY_MEMORY = 1 << 30  # else Ray refuses to start where less is free than its object store may take


def new_folder() -> str:
    """Make the folder of a cluster, for its owner alone: where temporary files go, if Ray's sockets fit below that."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="rlb-", dir=usual if len(usual) + SOCKET_BELOW <= SOCKET_PATH else "/tmp")


def warm_socket(folder: str | Path) -> Path:
    """Return where the warm process of a cluster listens; its pid stands beside that."""
    return Path(folder) / "warm.socket"


def command(port: int, folder: Path, devices: int, gpus: int) -> list[str]:
    """Return the command line that starts the head node, with ports of its own and a bounded object store."""
    shm = os.statvfs("/dev/shm")  # a third of what is free there at most, as weights lie there too
    options = {
        "port": port,
        "temp-dir": folder / "ray",
        "num-cpus": devices,
        "num-gpus": gpus,
        "memory": RAY_MEMORY,
        "object-store-memory": max(128 << 20, min(4 << 30, shm.f_bavail * shm.f_frsize // 3)),
    }
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *FLAGS.split()]
    ray += [f"--{name}={value}" for name, value in options.items()]
    # the warm process first, so that it imports while Ray starts; both are of one process session
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in allocator.environment().items())
    return ["/bin/sh", "-c", f'{settings} "$0" -m rlbench.runtime.warm & exec "$@"', sys.executable, *ray]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of Ray's processes, and so of all workers; sockets and caches in a folder of their own."""
    temporary = folder / "tmp"
    temporary.mkdir(mode=0o700, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JPY_", "RAY_"))}
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(registry.token_file()),
        "RAY_enable_metrics_collection": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_niceness": "0",
        worker_start.SOCKET: str(warm_socket(folder)),
        "RAY_START_HOOK": f"{__name__}.leave_out_unused",
        "TMPDIR": str(temporary),
    }
    return kept | openmp.environment() | ONE_MACHINE | own


def leave_out_unused(ray_params: Any, is_head: bool) -> None:
    """Start neither Ray's client server nor its API server, which no option does: Ray calls this before it starts."""
    import ray
    from ray._private.node import Node

    ray_params.ray_client_server_port = None
    ray_params.worker_path = worker_start.__file__
    os.environ[worker_start.RAYS_OWN] = str(Path(ray.__file__).parent / "_private/workers/default_worker.py")
    Node.start_api_server = lambda self, **options: None
