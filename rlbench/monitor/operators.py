"""Operators: processes that drive a session for one control verb, so that the monitor need not know what a verb does.

An operator is a Ray task that lives for its verb alone and is named, not imported, like the workers are.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import Any

import ray

from rlbench.errors import RLBenchError, SessionError
from rlbench.monitor.running import answers

OPERATOR = "rlbench.session.operator:operate"
LOOK_LIMIT_S = 2.0


def run(session: str, cluster_id: str, epoch: int, verb: str, args: dict[str, Any]) -> Any:
    """Run a verb to its end and return what it gave; raises what it raised, SessionError where its process died."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    task = ray.remote(max_calls=1)(by_name).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
    try:
        return ray.get(task.remote(OPERATOR, session, cluster_id, epoch, verb, args))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RLBenchError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise SessionError(f"the process that ran {verb} ended: {error}") from error


def by_name(path: str, *args: Any) -> Any:
    """Call `module:function`; what an operator's process executes."""
    return pkgutil.resolve_name(path)(*args)


def untracked(actors: Sequence[Any]) -> list[str]:
    """Methods that workers execute now, also of calls too short to be told to the monitor."""
    names = answers([actor.running.remote() for actor in actors], LOOK_LIMIT_S)
    return list(dict.fromkeys(name for name in names if name is not None))
