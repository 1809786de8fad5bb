"""Start, find, join and leave the Ray cluster; the one place that calls `ray.init`.

`init()` finds the cluster this user already runs, or starts one below a guard; it can be called again at any time.
`init(address=…)` joins a cluster that others run, which we never stop.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import psutil

from rlbench.errors import ClusterError, nearest
from rlbench.runtime import guard, processes, registry, starting
from rlbench.runtime.devices import default_devices, gpu_count

NAMESPACE = "rlbench"


@dataclass(frozen=True)
class Cluster:
    """A joined cluster; as a context manager it shuts down at the end. `id` is empty where others run it."""

    address: str
    devices: int
    gpus: int
    id: str = ""

    @property
    def ours(self) -> bool:
        """True where our guard runs it."""
        return bool(self.id)

    @property
    def shm_prefix(self) -> str:
        """Start of the names of our shared-memory files on this cluster."""
        return f"rlb-{self.id or 'joined'}-"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        shutdown()

    def __repr__(self) -> str:
        kind = f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}" if self.gpus else f"{self.devices} CPU device slots"
        return f"Cluster({self.address}, {kind}{'' if self.ours else ', run by others'})"


_joined: Cluster | None = None
_at_shutdown: list[Any] = []
_interface: str | None = None


def init(address: str | None = None, devices: int | None = None, network_interface: str | None = None) -> Cluster:
    """Join the cluster: ours (started if need be), or the one at `address`.

    Args:
        address: `host:port` of a Ray cluster that others run; None for our own.
        devices: device slots of our own cluster on a host without a GPU (default: the cores). Counts when a cluster
            is started; asking a running one for another number raises.
        network_interface: by name (`"eth0"`), on every node: the ranks and replicas of engines built from now on talk
            over it. Default: loopback on one machine, else the interface a packet would leave by. Ray itself stays on
            loopback in a cluster of our own, and where others started it in theirs.

    Returns:
        The joined `Cluster`; the same one when called again.

    Raises:
        ClusterError: Ray was initialised some other way, nothing answers at `address`, Ray does not start, or this host
            has no such interface.
    """
    global _joined, _interface
    if network_interface is not None:
        _interface = _known_interface(network_interface)
    if devices is not None and devices < 1:
        raise ClusterError(f"devices={devices}: at least one device slot is needed")
    if _joined is not None and _still_joined():
        return _same(_joined, address, devices)
    _refuse_foreign_ray()
    with starting.starting("the cluster"):
        if address is not None and not _is_our_address(address):
            _joined = _join_other(address)
        else:
            with registry.locked():
                record = _find_ours() or _start(devices)
            _joined = _same(_join_ours(record), None, devices)
    return _joined


def network_interface() -> str | None:
    """The interface that `init` was told, by name."""
    return _interface


def _known_interface(name: str) -> str:
    known = psutil.net_if_addrs()
    if name not in known:
        raise ClusterError(
            f"network_interface={name!r}: this host has no such interface{nearest(name, known)}; it has "
            f"{', '.join(known)}. Leave it out on a single machine"
        )
    return name


def _is_our_address(address: str) -> bool:
    record = registry.read_cluster()
    return record is not None and record.address == address and guard_alive(record)


def current() -> Cluster:
    """The joined cluster, joining our own first where none is."""
    return _joined if _joined is not None and _still_joined() else init()


def join_own_worker(cluster_id: str) -> Cluster:
    """For code that runs in a worker process of the cluster: that cluster is joined already, as `cluster_id`."""
    global _joined
    import ray

    record = registry.read_cluster()
    if record is not None and record.id == cluster_id:
        _joined = Cluster(record.address, record.devices, record.gpus, record.id)
        return _joined
    total = ray.cluster_resources()
    gpus = int(total.get("GPU", 0))
    _joined = Cluster(ray.get_runtime_context().gcs_address, gpus or int(total.get("CPU", 1)), gpus, cluster_id)
    return _joined


def is_joined() -> bool:
    """True when this process is connected to a cluster."""
    return _joined is not None and _still_joined()


def on_shutdown(action: Any) -> None:
    """Run `action()` at the start of the next `shutdown()`; how engines of this process get closed first."""
    _at_shutdown.append(action)


def shutdown() -> None:
    """Leave the cluster, after closing the engines this process built; end it when it is ours and empty.

    Named sessions keep it (and their weights) alive: `session.close()` ends one. Safe to call twice.
    """
    global _joined, _interface
    _interface = None
    if _joined is None:
        record = registry.read_cluster()
        if record is not None and guard_alive(record) and not registry.live_sessions(record.id):
            stop_cluster(record)
        return
    while _at_shutdown:
        _at_shutdown.pop()()
    leaving, _joined = _joined, None
    import ray

    ray.shutdown()
    record = registry.read_cluster()
    if leaving.ours and record is not None and record.id == leaving.id and not registry.live_sessions(leaving.id):
        stop_cluster(record)


def stop_cluster(record: registry.ClusterRecord) -> None:
    """End our cluster with everything on it, and wait until it is gone."""
    with registry.locked():
        if guard_alive(record):
            os.kill(record.guard_pid, 15)
            deadline = time.monotonic() + 20.0
            while guard_alive(record) and time.monotonic() < deadline:
                time.sleep(0.05)
        if registry.read_cluster() == record:
            _clean_up_after(record)


def guard_alive(record: registry.ClusterRecord) -> bool:
    """True while the guard of this cluster runs."""
    return processes.is_same(record.guard_pid, record.guard_start)


def resources() -> dict[str, Any]:
    """What the joined cluster has: address, devices, GPUs, nodes, and what Ray has free now."""
    import ray

    cluster = current()
    return {
        "address": cluster.address,
        "ours": cluster.ours,
        "devices": cluster.devices,
        "gpus": cluster.gpus,
        "nodes": sum(node["Alive"] for node in ray.nodes()),
        "total": ray.cluster_resources(),
        "available": ray.available_resources(),
        "sessions": [s["name"] for s in registry.live_sessions(cluster.id)],
    }


def _same(cluster: Cluster, address: str | None, devices: int | None) -> Cluster:
    if address is not None and address != cluster.address:
        raise ClusterError(
            f"this process is on the cluster at {cluster.address}; call rb.shutdown() before joining {address}"
        )
    if devices is not None and devices != cluster.devices:
        raise ClusterError(
            f"the running cluster has {cluster.devices} devices, not {devices}; end its sessions and call "
            f"rb.shutdown(), then rb.init(devices={devices})"
        )
    return cluster


def _still_joined() -> bool:
    import ray

    if not ray.is_initialized():
        return False
    if _joined is not None and _joined.ours and not guard.answers(_joined.address, 2.0):
        ray.shutdown()  # the cluster went away below us: let init() start afresh
        return False
    return True


def _refuse_foreign_ray() -> None:
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise ClusterError(
            "Ray is already initialised in this process by something else. Call ray.shutdown() first, or "
            "rb.init(address=…) before anything else initialises Ray, to share that cluster"
        )


def _find_ours() -> registry.ClusterRecord | None:
    record = registry.read_cluster()
    if record is None:
        return None
    if guard_alive(record) and guard.answers(record.address):
        return record
    deadline = time.monotonic() + 15.0
    while guard_alive(record) and time.monotonic() < deadline:
        if guard.answers(record.address, 2.0):  # only the machine was busy
            return record
        time.sleep(0.1)
    if guard_alive(record):
        raise ClusterError(
            f"our cluster at {record.address} does not answer, though its guard (pid {record.guard_pid}) lives: wait, "
            "or end it with `rlbench stop --all`"
        )
    _clean_up_after(record)
    return None


def _clean_up_after(record: registry.ClusterRecord) -> None:
    """Remove what a cluster left whose guard could not; its process ids may be somebody else's by now."""
    leader = processes.start_time(record.ray_session)
    still_its = record.boot == processes.boot_id() and leader in (None, record.ray_start)
    guard.clean_up(record.id, record.ray_session if still_its else None, record.temp_dir)


def _start(devices: int | None) -> registry.ClusterRecord:
    cluster_id = secrets.token_hex(4)
    log = registry.state_dir() / "guard.log"
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        started = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rlbench.runtime.guard",
                cluster_id,
                str(devices or default_devices()),
                str(gpu_count()),
            ],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        with starting.phase(starting.CLUSTER, "starting Ray"):
            record = _awaited(cluster_id, started)
    except BaseException:  # an interrupt: nothing of it stays
        started.terminate()
        raise
    if record is not None:
        return record
    started.terminate()
    said = log.read_text(errors="replace").strip().splitlines()[-5:]
    raise ClusterError("Ray did not start; the last lines of " + str(log) + ":\n  " + "\n  ".join(said))


def _awaited(cluster_id: str, started: subprocess.Popen[bytes]) -> registry.ClusterRecord | None:
    """The record that the guard publishes once Ray answers; None where it ended, or the time is over."""
    deadline = time.monotonic() + guard.ATTEMPTS * guard.START_LIMIT_S
    while time.monotonic() < deadline and started.poll() is None:
        record = registry.read_cluster()
        if record is not None and record.id == cluster_id:
            return record
        time.sleep(0.05)
    return None


def _join_ours(record: registry.ClusterRecord) -> Cluster:
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ClusterError(
            "Ray was imported before rlbench could give it the cluster's token, which it reads at its import: restart "
            "the kernel and call rb.init() (or make the session) before `import ray`"
        )
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = record.token_path
    _ray_init(record.address)
    return Cluster(record.address, record.devices, record.gpus, record.id)


def _join_other(address: str) -> Cluster:
    if not guard.answers(address, 2.0):
        raise ClusterError(
            f"nothing answers at {address}: check the address (host:port), or rb.init() for a cluster of your own"
        )
    _ray_init(address)
    import ray

    total = ray.cluster_resources()
    gpus = int(total.get("GPU", 0))
    return Cluster(address, gpus or int(total.get("CPU", 1)), gpus)


def _ray_init(address: str) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns in the first cell
    # a remote call that comes after shutdown() must not start a cluster of its own
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    with starting.phase("joining", "joining Ray"):
        _connect(address)


def _connect(address: str) -> None:
    import ray
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # as `head.ONE_MACHINE`, also where ray was imported before
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        _say_nothing_of_deaths()
    except ConnectionError as error:
        if "AuthenticationError" in str(error.__cause__):  # Ray wraps it as text
            raise ClusterError(
                f"the Ray cluster at {address} wants its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (or "
                "RAY_AUTH_TOKEN) in this process's environment before it imports ray, then rb.init(address=…) again"
            ) from error
        raise ClusterError(f"the Ray cluster at {address} does not take us in: {error}") from error


def _say_nothing_of_deaths() -> None:
    """End the thread that prints Ray's page about a dead worker into the cell, beside ours: no option does.

    Does what Ray's own disconnect does to it, which is safe to do twice.
    """
    from ray._private.worker import global_worker

    global_worker.threads_stopped.set()
    global_worker.gcs_error_subscriber.close()
    global_worker.listener_thread.join(5.0)
    global_worker.threads_stopped.clear()
