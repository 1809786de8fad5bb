"""What a session holds on its cluster: actors, devices, processes on this node."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray

from rlbench.monitor.state import State
from rlbench.runtime import processes


def actors(state: State, engine: str | None = None) -> list[Any]:
    """Return the worker actors of an engine, or of all, that Ray knows."""
    handles, records = [], state["engines"]
    for record in records.values() if engine is None else [records.get(engine, {})]:
        for name in record.get("actors", []):
            with contextlib.suppress(ValueError):  # died, or not born yet: nothing to tell it
                handles.append(ray.get_actor(name))
    return handles


def pids(state: State) -> dict[str, int]:
    """Process of each worker, by actor."""
    return {name: pid for engine in state["engines"].values() for name, pid in engine.get("pids", {}).items()}


def session_record(name: str, cluster: str, shm_prefix: str, state: State) -> dict[str, Any]:
    """What the session's file says of this process and its workers, for who has to end them without it."""
    return {
        "name": name,
        "cluster": cluster,
        "pid": os.getpid(),
        "started": processes.start_time(os.getpid()),
        "boot": processes.boot_id(),
        "node": ray.get_runtime_context().get_node_id(),
        "epoch": state["epoch"],
        "shm": shm_prefix,
        "workers": {a: [pid, processes.start_time(pid)] for a, pid in pids(state).items() if beside(pid)},
    }


def lives(name: str) -> bool:
    """Whether Ray still knows the actor: its process may be on another node, where no pid of ours means anything."""
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


def beside(pid: int) -> bool:
    """Whether Ray started the process on this node with ours; a number from another node means nothing here."""
    try:
        return os.getsid(pid) == os.getsid(0)
    except ProcessLookupError:
        return False


def placements(state: State) -> set[str]:
    """Names of the placement groups that the engines' devices come from."""
    return {name for engine in state["engines"].values() for name in engine.get("placements", [])}


def remove_placement(name: str) -> None:
    """Give its devices back; nothing happens where it is gone already."""
    with contextlib.suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(name))
