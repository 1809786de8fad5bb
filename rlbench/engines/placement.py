"""Which devices an engine gets: slots of a host without a GPU, or GPUs; shared by colocated engines.

A device is one bundle of a placement group of the session. On GPUs a bundle is the whole GPU; on a CPU host it is a
small share of the host, because engines (and sessions) take turns there and memory is what limits them.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.dispatch.link import Link
from rlbench.errors import BuildError
from rlbench.runtime import cluster
from rlbench.weights.facts import INTERFACE

CPU_SHARE = 1 / 16
GPU_SHARE = 1 / 20
READY_LIMIT_S = 60.0


@dataclass(frozen=True)
class Device:
    """Bundle `bundle` of the placement group named `placement`."""

    placement: str
    bundle: int


def devices_of(state: dict[str, Any], engine: str | None = None) -> list[Device]:
    """Devices in use by the session's engines (with repeats), or by one of them."""
    engines = state["engines"]
    records = engines.values() if engine is None else [engines[engine]]
    return [Device(p, b) for record in records for p, b in record.get("devices", [])]


def unshared(state: dict[str, Any]) -> list[Device]:
    """Devices of the session's engines that share with nobody (`allow_colocate=False`)."""
    engines = state["engines"].items()
    return [device for name, record in engines if record.get("alone") for device in devices_of(state, name)]


def allot(
    link: Link, count: int, colocate_with: Sequence[Device], avoid: Sequence[Device] = (), alone: bool = False
) -> list[Device]:
    """Choose `count` devices: those of the engine to colocate with first, then unused ones, then the least shared.

    `alone`: unused ones only. Raises BuildError where the cluster has fewer devices, or will not give them.
    """
    total = cluster.current().devices
    if count > total:
        raise BuildError(
            f"the engine wants {count} devices and the cluster has {total}: lower tensor_parallel_size or "
            f"data_parallel_size{'' if cluster.current().gpus else f', or start with rb.init(devices={count})'}"
        )
    chosen = list(dict.fromkeys(colocate_with))[:count]
    use = Counter(devices_of(link.state()))
    fresh = min(count - len(chosen), total - len(use))
    if alone and fresh < count:
        raise BuildError(
            f"allow_colocate=False: the engine wants {count} devices of its own and {fresh} of {total} are unused: "
            "close another engine, ask for fewer, or let it share (allow_colocate=True)"
        )
    if fresh > 0:
        chosen += _reserve(link, fresh)
    shared = sorted((d for d in use if d not in chosen and d not in avoid), key=lambda d: use[d])
    chosen += shared[: count - len(chosen)]
    if len(chosen) < count:
        raise BuildError(f"only {len(chosen)} of {count} devices are left beside the engines not to colocate with")
    return chosen


def actor_options(device: Device) -> dict[str, Any]:
    """Ray's options that put an actor on `device`."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "num_cpus": 0,
        "num_gpus": GPU_SHARE if cluster.current().gpus else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            ray.util.get_placement_group(device.placement), placement_group_bundle_index=device.bundle
        ),
    }


def network_environment() -> dict[str, str]:
    """The environment that has an actor's process groups use the interface of `rb.init(network_interface=…)`."""
    name = cluster.network_interface()
    return {} if name is None else dict.fromkeys((INTERFACE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), name)


def visible_gpus(devices: Sequence[Device]) -> dict[str, str]:
    """The environment that shows one actor all GPUs of several bundles; Ray itself shows it those of its own."""
    if not cluster.current().gpus or len(devices) == 1:
        return {}
    import ray

    @ray.remote  # type: ignore[untyped-decorator]
    def ids() -> list[int]:
        return list(ray.get_gpu_ids())

    found = ray.get([ids.options(**actor_options(device)).remote() for device in devices], timeout=READY_LIMIT_S)
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(i) for part in found for i in part)}


def _reserve(link: Link, count: int) -> list[Device]:
    import ray

    name = f"rlbench/{link.name}/devices/{secrets.token_hex(3)}"
    bundle = {"GPU": 1.0} if cluster.current().gpus else {"CPU": CPU_SHARE}
    group = ray.util.placement_group([bundle] * count, strategy="STRICT_PACK", name=name, lifetime="detached")
    try:
        ready = group.wait(READY_LIMIT_S)
    except BaseException:
        ray.util.remove_placement_group(group)  # else it would seize the devices once they are free
        raise
    if not ready:
        ray.util.remove_placement_group(group)
        raise BuildError(
            f"the cluster did not give {count} more devices within {READY_LIMIT_S:g} s; another session holds them: "
            "see rb.resources() and `rlbench ps`"
        )
    return [Device(name, i) for i in range(count)]
