"""Ray's head node: how it is started, so that it is reached from this machine alone and runs only what sessions use.

Ray makes every folder of its own 0777 and its sockets and logs readable, so all of it lies in one folder that nobody
else can enter. It takes the machine's outer address for its own even where it is told 127.0.0.1, and then listens on
all interfaces; what it does on macOS and Windows, where a cluster is always one machine, is what we want on Linux too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlbench.runtime import registry

ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Keeps Ray from replacing 127.0.0.1 by the outer address; read when ray is imported."""
SOCKET_PATH = 107
"""How long the path of a unix socket may be."""
SOCKET_BELOW = len("/rlb-12345678/ray/session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store")
RAY_MEMORY = 1 << 30
"""What Ray calls the memory of the node, which nothing of ours asks for. Left to itself, it refuses to start where the
machine has less free than its object store may take at most."""


def new_folder() -> str:
    """Make the folder of a cluster, for its owner alone: where temporary files go, if Ray's sockets fit below that."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="rlb-", dir=usual if len(usual) + SOCKET_BELOW <= SOCKET_PATH else "/tmp")


def command(port: int, folder: Path, devices: int, gpus: int) -> list[str]:
    """Return the command line that starts the head node, with ports of its own and a bounded object store.

    Args:
        port: of the cluster's address.
        folder: of `new_folder`.
        devices, gpus: of the cluster.
    """
    return [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        f"--port={port}",
        "--node-ip-address=127.0.0.1",
        f"--temp-dir={registry.ray_folder(folder)}",
        f"--num-cpus={devices}",
        f"--num-gpus={gpus}",
        f"--memory={RAY_MEMORY}",
        f"--object-store-memory={object_store_bytes()}",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--no-monitor",
        "--disable-usage-stats",
        "--dashboard-agent-listen-port=0",
        "--min-worker-port=0",
        "--max-worker-port=0",
    ]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of Ray's processes, and so of all workers.

    Token authentication; none of the notebook's process identity; temporary files (torch, vLLM and others put sockets
    and caches under names that can be guessed) in a folder of their owner alone, gone with the cluster.
    """
    temporary = folder / "tmp"
    temporary.mkdir(mode=0o700, exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JPY_", "RAY_"))}
    return (
        kept
        | ONE_MACHINE
        | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(registry.token_file()),
            "RAY_enable_metrics_collection": "0",
            "RAY_START_HOOK": f"{__name__}.leave_out_unused",
            "TMPDIR": str(temporary),
        }
    )


def leave_out_unused(ray_params: Any, is_head: bool) -> None:
    """Start neither Ray's client server nor its API server: Ray calls this before it starts a node.

    No option does it: without a port the client server takes 10001, and without a dashboard the API server still runs,
    to gather usage statistics that are off.
    """
    from ray._private.node import Node

    ray_params.ray_client_server_port = None
    Node.start_api_server = lambda self, **options: None


def object_store_bytes() -> int:
    """Room for rollouts and batches: at most 4 GiB and at most a third of free shared memory (weights go there too)."""
    stat = os.statvfs("/dev/shm")
    return max(128 << 20, min(4 << 30, stat.f_bavail * stat.f_frsize // 3))
