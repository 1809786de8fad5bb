"""What a session holds on its cluster: actors, devices, processes on this node."""

from __future__ import annotations

import os
from typing import Any

import ray

from rlbench.monitor.state import State


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


def lives(name: str) -> bool:
    """Whether Ray still knows the actor: its process may be on another node, where no pid of ours means anything."""
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


def beside(pid: int) -> bool:
    """True for a process that Ray started on this node with ours: a worker elsewhere has a number that is not its own
    here.
    """
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
