"""What a session holds on its cluster: actors, devices, processes on this node."""

from __future__ import annotations

import os
from typing import Any

import ray

from rlbench.monitor.state import State
from rlbench.runtime import processes


def actors(state: State, engine: str | None = None) -> list[Any]:
    """The worker actors of an engine, or of all, that Ray knows."""
    found = []
    records = state["engines"]
    for record in records.values() if engine is None else [records.get(engine, {})]:
        for name in record.get("actors", []):
            try:
                found.append(ray.get_actor(name))
            except ValueError:
                continue  # died, or not born yet: nothing to tell it
    return found


def pids(state: State) -> dict[str, int]:
    """Process of each worker, by actor."""
    return {name: pid for engine in state["engines"].values() for name, pid in engine.get("pids", {}).items()}


def session_record(name: str, cluster: str, shm_prefix: str, state: State) -> dict[str, Any]:
    """What the session's file says of this process and its workers, for who has to end them without it."""
    workers = {actor: pid for actor, pid in pids(state).items() if beside(pid)}
    return {
        "name": name,
        "cluster": cluster,
        "pid": os.getpid(),
        "started": processes.start_time(os.getpid()),
        "boot": processes.boot_id(),
        "node": ray.get_runtime_context().get_node_id(),
        "epoch": state["epoch"],
        "shm": shm_prefix,
        "workers": {actor: [pid, processes.start_time(pid)] for actor, pid in workers.items()},
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
    try:
        ray.util.remove_placement_group(ray.util.get_placement_group(name))
    except ValueError:
        return  # already gone
