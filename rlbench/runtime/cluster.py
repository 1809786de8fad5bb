"""Start, find, join and leave the Ray cluster; the one place that calls `ray.init`.

`init()` finds the cluster this user already runs, or starts one below a guard. One that others run is never stopped.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import psutil

from rlbench.errors import ClusterError, nearest
from rlbench.runtime import guard, head, processes, registry, starting
from rlbench.runtime.devices import gpu_count


@dataclass(frozen=True)
class Cluster:
    """A joined cluster; as a context manager it shuts down at the end. `id` is empty where others run it."""

    address: str
    devices: int
    gpus: int
    id: str = ""

    @property
    def ours(self) -> bool:
        """Whether our guard runs it."""
        return bool(self.id)

    @property
    def shm_prefix(self) -> str:
        """Start of the names of our shared-memory files on this cluster."""
        return f"rlb-{self.id or 'joined'}-"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        shutdown()

    def __repr__(self) -> str:
        kind = f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}" if self.gpus else f"{self.devices} CPU device slots"
        return f"Cluster({self.address}, {kind}{'' if self.ours else ', run by others'})"


RECONNECT_S = "1000000"
RESTART_S = 60.0
_joined: Cluster | None = None
_silent_since: float | None = None
_at_shutdown: list[Any] = []
_interface: str | None = None


def init(address: str | None = None, devices: int | None = None, network_interface: str | None = None) -> Cluster:
    """Join the cluster: ours (started if need be), or the one at `address`. The same `Cluster` when called again.

    Args:
        address: `host:port` of a Ray cluster that others run; None for our own.
        devices: device slots of our own cluster on a host without a GPU (default: the cores). Counts when a cluster
            is started; asking a running one for another number raises.
        network_interface: by name (`"eth0"`), on every node: what ranks and replicas of engines built from now on talk
            over. Default: loopback on one machine, else the interface a packet would leave by.
    """
    global _joined, _interface
    if network_interface is not None:
        _interface = _known_interface(network_interface)
    if devices is not None and devices < 1:
        raise ClusterError(f"devices={devices}: at least one device slot is needed")
    if _joined is not None and is_joined():
        return _same(_joined, address, devices)
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        raise ClusterError(
            "Ray is already initialised in this process by something else. Call ray.shutdown() first, or "
            "rb.init(address=…) before anything else initialises Ray, to share that cluster"
        )
    known = registry.read_cluster()
    with starting.starting("the cluster"):
        if address is None or (known is not None and known.address == address and guard_alive(known)):
            with registry.locked():
                record = _find_ours() or _start(devices)
            _joined = _same(_join_ours(record), None, devices)
        elif guard.answers(address, 2.0):
            _ray_init(address)
            _joined = _seen(address)
        else:
            raise ClusterError(
                f"nothing answers at {address}: check the address (host:port), or rb.init() for a cluster of your own"
            )
    return _joined


def network_interface() -> str | None:
    """Return the interface that `init` was told, by name."""
    return _interface


def _known_interface(name: str) -> str:
    known = psutil.net_if_addrs()
    if name not in known:
        raise ClusterError(
            f"network_interface={name!r}: this host has no such interface{nearest(name, known)}; it has "
            f"{', '.join(known)}. Leave it out on a single machine"
        )
    return name


def current() -> Cluster:
    """Return the joined cluster, joining our own first where none is."""
    return _joined if _joined is not None and is_joined() else init()


def device_count() -> int:
    """Return how many devices the cluster has now: nodes of one that others run come and go."""
    joined = current()
    return joined.devices if joined.ours else _seen(joined.address).devices


def node_address() -> str:
    """Return the address by which Ray knows the node of this process."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own)


def node_devices() -> dict[str, int]:
    """Return by address how many devices each node has that lives."""
    import ray

    kind = "GPU" if current().gpus else "CPU"
    alive = {str(node["NodeManagerAddress"]): node["Resources"] for node in ray.nodes() if node["Alive"]}
    return {address: int(alive[address].get(kind, 0)) for address in sorted(alive)}


def has_several_nodes() -> bool:
    """Whether the cluster has more than one node now, with devices or without."""
    return not current().ours and len(node_devices()) > 1


def join_own_worker(cluster_id: str) -> None:
    """Note, in a worker process of a cluster, which cluster that is: it is joined already."""
    global _joined
    import ray

    _joined = _seen(ray.get_runtime_context().gcs_address, cluster_id)


def _seen(address: str, cluster_id: str = "") -> Cluster:
    """Describe the cluster that this process is connected to, by what Ray says of it."""
    import ray

    total = ray.cluster_resources()
    gpus = int(total.get("GPU", 0))
    return Cluster(address, gpus or int(total.get("CPU", 1)), gpus, cluster_id)


def is_joined() -> bool:
    """Whether this process is connected to a cluster; where ours went away below it, it is let go."""
    if _joined is None:
        return False
    import ray

    if not ray.is_initialized():
        return False
    if _joined.ours and has_ended():
        ray.shutdown()  # let init() start afresh
        return False
    return True


def has_ended() -> bool:
    """Whether the cluster that this process is connected to is gone: Ray goes on waiting for it to come back.

    Ours is as soon as nothing answers; one that others run may be restarted, and has a minute for it.
    """
    global _silent_since
    if _joined is None or guard.answers(_joined.address, 2.0):
        _silent_since = None
        return False
    now = time.monotonic()
    _silent_since = now if _silent_since is None else _silent_since
    return _joined.ours or now - _silent_since > RESTART_S


def on_shutdown(action: Any) -> None:
    """Run `action()` at the start of the next `shutdown()`; how engines of this process get closed first."""
    _at_shutdown.append(action)


def shutdown() -> None:
    """Leave the cluster, after closing the engines this process built; end it when it is ours and empty.

    Named sessions keep it (and their weights) alive: `session.close()` ends one. Safe to call twice.
    """
    global _joined, _interface
    _interface = None
    leaving = _joined
    if leaving is not None:
        while _at_shutdown:
            _at_shutdown.pop()()
        _joined = None
        import ray

        ray.shutdown()
    record = registry.read_cluster()
    if record is None or registry.live_sessions(record.id):
        return
    if guard_alive(record) if leaving is None else record.id == leaving.id:
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
    """Whether the guard of this cluster runs."""
    return processes.is_same(record.guard_pid, record.guard_start)


def resources() -> dict[str, Any]:
    """Return what the joined cluster has: address, devices, GPUs, how many each node has by its address, what Ray has
    free now, and the resident bytes of the warm process that workers are forks of, None where there is none."""
    import ray

    cluster, record = current(), registry.read_cluster()
    pid_file = (
        None if record is None or record.id != cluster.id else head.warm_socket(record.temp_dir).with_suffix(".pid")
    )
    warm = processes.memory_bytes(int(pid_file.read_text())) if pid_file is not None and pid_file.exists() else None
    return {
        "address": cluster.address,
        "ours": cluster.ours,
        "devices": device_count(),
        "gpus": cluster.gpus,
        "nodes": node_devices(),
        "total": ray.cluster_resources(),
        "available": ray.available_resources(),
        "warm_bytes": warm and warm[0],
        "sessions": [s["name"] for s in registry.live_sessions(cluster.id)],
    }


def _same(cluster: Cluster, address: str | None, devices: int | None) -> Cluster:
    if address not in (None, cluster.address) or devices not in (None, cluster.devices):
        raise ClusterError(
            f"this process is on the cluster at {cluster.address} with {cluster.devices} devices: end its sessions and "
            f"call rb.shutdown() before rb.init(address={address!r}, devices={devices})"
        )
    return cluster


def _find_ours() -> registry.ClusterRecord | None:
    record = registry.read_cluster()
    if record is None:
        return None
    deadline = time.monotonic() + 15.0
    while guard_alive(record):
        if guard.answers(record.address, 2.0):
            return record
        if time.monotonic() > deadline:  # more than a busy machine
            raise ClusterError(
                f"our cluster at {record.address} does not answer, though its guard (pid {record.guard_pid}) lives: "
                "wait, or end it with `rlbench stop --all`"
            )
        time.sleep(0.1)
    _clean_up_after(record)
    return None


def _clean_up_after(record: registry.ClusterRecord) -> None:
    """Remove what a cluster left whose guard could not; its process ids may be somebody else's by now."""
    leader = processes.start_time(record.ray_session)
    still_its = record.boot == processes.boot_id() and leader in (None, record.ray_start)
    guard.clean_up(record.id, record.ray_session if still_its else None, record.temp_dir)


def _start(devices: int | None) -> registry.ClusterRecord:
    """Start a guard and return the record that it publishes once Ray answers."""
    cluster_id = secrets.token_hex(4)
    log = registry.state_dir() / "guard.log"
    slots = devices or gpu_count() or len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", guard.__name__, cluster_id, str(slots), str(gpu_count())]
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        started = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        with starting.phase("cluster", "starting Ray"):
            deadline = time.monotonic() + guard.ATTEMPTS * guard.START_LIMIT_S
            while time.monotonic() < deadline and started.poll() is None:
                record = registry.read_cluster()
                if record is not None and record.id == cluster_id:
                    return record
                time.sleep(0.05)
        said = log.read_text(errors="replace").strip().splitlines()[-5:]
        raise ClusterError("Ray did not start; the last lines of " + str(log) + ":\n  " + "\n  ".join(said))
    except BaseException:  # an interrupt, too: nothing of it stays
        started.terminate()
        raise


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


def prepare_ray() -> None:
    """Set what Ray reads from the environment as it is imported."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns in the first cell
    # a process whose cluster has ended, as ours does when no session lives on it for a while, is ended by Ray a minute
    # later: it is a person's notebook, which goes on with the next cluster (`has_ended` tells who waits for this one)
    os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = RECONNECT_S
    # a remote call that comes after shutdown() must not start a cluster of its own
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


def _ray_init(address: str) -> None:
    prepare_ray()
    with starting.phase("joining", "joining Ray"):
        import ray
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False  # as `head.ONE_MACHINE`, also where ray was imported before
        try:
            ray.init(address=address, namespace="rlbench", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            if "AuthenticationError" in str(error.__cause__):  # Ray wraps it as text
                raise ClusterError(
                    f"the Ray cluster at {address} wants its token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH "
                    "(or RAY_AUTH_TOKEN) in this process's environment before it imports ray, then "
                    "rb.init(address=…) again"
                ) from error
            raise ClusterError(f"the Ray cluster at {address} does not take us in: {error}") from error
        _say_nothing_of_deaths()


def _say_nothing_of_deaths() -> None:
    """End the thread that prints Ray's page about a dead worker into the cell, as Ray's own disconnect does."""
    from ray._private.worker import global_worker

    global_worker.threads_stopped.set()
    global_worker.gcs_error_subscriber.close()
    global_worker.listener_thread.join(5.0)
    global_worker.threads_stopped.clear()
