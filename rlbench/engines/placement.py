"""Which devices an engine gets: bundles of placement groups of the session, shared by colocated engines.

On GPUs a bundle is the whole GPU; on a CPU host a small share of it, as engines take turns there.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.dispatch.link import Link
from rlbench.errors import BuildError, nearest
from rlbench.runtime import cluster, openmp
from rlbench.weights.facts import INTERFACE, LOOPBACK, NODE_ADDRESS

CPU_SHARE = 1 / 16
GPU_SHARE = 1 / 20
NODE_SHARE = 0.001
"""Of the resource by which Ray says a node's address: a bundle with it is on that node."""
SPREAD = ("spread",)
READY_LIMIT_S = 180.0


@dataclass(frozen=True)
class Device:
    """Bundle `bundle` of the placement group named `placement`."""

    placement: str
    bundle: int


@dataclass(frozen=True)
class Wish:
    """Where an engine's devices are to be: `count` of them, each `size` in a row on one node; those of engine `beside`
    first; not those of `apart_from`; with `alone`, unused ones only, for none to share.

    `nodes`: (): as few as can be; ("spread",): as many as can be; else addresses, which share them evenly.
    """

    count: int
    size: int = 1
    beside: str | None = None
    apart_from: str | None = None
    alone: bool = False
    nodes: tuple[str, ...] = ()


def place(link: Link, wish: Wish) -> list[Device]:
    """Choose devices for an engine: those of the engine beside first, then unused ones, then the least shared; those of
    a node in a row."""
    there = _allowed_nodes(wish)
    engines = link.state("engines")["engines"]
    devices = {name: [Device(*pair) for pair in record.get("devices", [])] for name, record in engines.items()}
    unshared = {device for name, record in engines.items() if record.get("alone") for device in devices[name]}
    chosen = list(dict.fromkeys(devices[wish.beside]))[: wish.count] if wish.beside else []
    if unshared.intersection(chosen):
        raise BuildError(f"cannot place the engine beside {wish.beside!r}, which was built with allow_colocate=False")
    use = Counter(device for own in devices.values() for device in own)
    at = located(device.placement for device in use)
    free = there - Counter(at[device] for device in use if at.get(device) in there)
    if wish.alone and free.total() < wish.count:
        raise BuildError(
            f"allow_colocate=False: the engine wants {wish.count} devices of its own and {free.total()} of "
            f"{there.total()} are unused: close another engine, ask for fewer, or let it share (allow_colocate=True)"
        )
    apart = devices[wish.apart_from] if wish.apart_from else []
    # without wishes all nodes are as one, from which Ray chooses
    beside_them = Counter(at.get(device) for device in apart)
    parts = _evenly(wish, there, free, beside_them) if wish.nodes else [([*there], wish.count - len(chosen))]
    for nodes, count in parts:
        own = {device for device, node in at.items() if node in nodes} - {*chosen}
        fresh = min(count, sum(free[node] for node in nodes))
        taken = [device for device in at if device in own and device not in use][:fresh]
        if fresh > len(taken):
            taken += _reserve(link, fresh - len(taken), wish.size, nodes[0] if wish.nodes else None)
        shared = sorted((d for d in use if d in own and d not in unshared and d not in apart), key=lambda d: use[d])
        chosen += [*taken, *shared[: count - len(taken)]]
    if len(chosen) < wish.count:
        raise BuildError(f"only {len(chosen)} of {wish.count} devices are left beside the engines not to colocate with")
    return _by_node(chosen, wish.size)


def device_count(nodes: tuple[str, ...] = ()) -> int:
    """Return how many devices the nodes of a wish have."""
    if nodes in ((), SPREAD):
        return cluster.device_count()
    there = cluster.node_devices()
    return sum(there.get(node, 0) for node in dict.fromkeys(nodes))


def located(placements: Iterable[str]) -> dict[Device, str]:
    """Return the address of the node of every device of these placement groups, empty where its node is gone."""
    import ray

    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    at: dict[Device, str] = {}
    for name in sorted(set(placements)):
        table = ray.util.placement_group_table(ray.util.get_placement_group(name))
        nodes = table["bundles_to_node_id"]
        at |= {Device(name, int(bundle)): addresses.get(nodes.get(bundle, ""), "") for bundle in table["bundles"]}
    return at


def addresses(devices: Sequence[Device]) -> list[str]:
    """Return the address of each device's node."""
    at = located(device.placement for device in devices)
    return [at[device] for device in devices]


def resources() -> dict[str, Any]:
    """Return what the cluster has (`rlbench.runtime.cluster.resources`), and who sits where: `nodes` has, by address,
    how many `devices` each has and its `workers` by names such as "demo: rank 0 of actor"."""
    found = cluster.resources()
    nodes: dict[str, Any] = {node: {"devices": count, "workers": []} for node, count in found["nodes"].items()}
    for session in found["sessions"]:
        for name, record in Link.look(session, "engines")["engines"].items():
            for i, node in enumerate(record.get("nodes", [])):
                gone = {"devices": 0, "workers": []}
                nodes.setdefault(node, gone)["workers"].append(f"{session}: {record['label']} {i} of {name}")
    return found | {"nodes": nodes}


def actor_options(device: Device) -> dict[str, Any]:
    """Return Ray's options that put an actor on `device`."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "num_cpus": 0,
        "num_gpus": GPU_SHARE if cluster.current().gpus else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            ray.util.get_placement_group(device.placement), placement_group_bundle_index=device.bundle
        ),
    }


def thread_environment(threads: int, node: str = LOOPBACK) -> dict[str, str]:
    """Return the environment of an actor that computes with so many threads on `node`, its process groups over the
    interface of `rb.init(network_interface=…)`."""
    env = openmp.environment() | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    env |= {} if node == LOOPBACK else {NODE_ADDRESS: node}
    interface = cluster.network_interface()
    names = (INTERFACE, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return env if interface is None else env | dict.fromkeys(names, interface)


def visible_gpus(devices: Sequence[Device]) -> dict[str, str]:
    """Return the environment that shows one actor all GPUs of several bundles; Ray itself shows it those of its own."""
    if not cluster.current().gpus or len(devices) == 1:
        return {}
    import ray

    @ray.remote  # type: ignore[untyped-decorator]
    def ids() -> list[int]:
        return list(ray.get_gpu_ids())

    parts = ray.get([ids.options(**actor_options(device)).remote() for device in devices], timeout=READY_LIMIT_S)
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(i) for part in parts for i in part)}


def _allowed_nodes(wish: Wish) -> Counter[str]:
    """Return the nodes an engine may be on, with how many devices each has; BuildError where that cannot be."""
    if wish.beside is not None and (wish.alone or wish.nodes):
        other = "allow_colocate=False" if wish.alone else "nodes="
        raise BuildError(f"{other} and colocate_with= contradict each other: give one of them")
    every, own, joined = cluster.node_devices(), cluster.node_address(), cluster.current()
    named = [*wish.nodes] if wish.nodes not in ((), SPREAD) else sorted(every, key=lambda node: node != own)
    if unknown := [node for node in named if node not in every]:
        raise BuildError(
            f"nodes={unknown[0]!r}{nearest(unknown[0], every)}: there is no such node in the cluster, or it is gone; "
            f"there are {', '.join(every)}, and 'spread' takes as many as can be"
        )
    there = Counter({node: every[node] for node in named})
    if wish.count > there.total():
        where = "the cluster has" if len(there) == len(every) else f"nodes={', '.join(there)}: they have"
        start = f", or start with rb.init(devices={wish.count})" if joined.ours and not joined.gpus else ""
        raise BuildError(
            f"the engine wants {wish.count} devices and {where} {there.total()}: lower tensor_parallel_size or "
            f"data_parallel_size{start}"
        )
    return there


def _evenly(
    wish: Wish, there: Counter[str], free: Counter[str], apart: Mapping[str | None, int]
) -> list[tuple[list[str], int]]:
    """Return how many devices each node gives: one group of `size` after the other to the node that has the fewest of
    this engine (`apart`: of it already, or of the one to stay away from), of those to the one with the most unused."""
    seats: Counter[str] = Counter()
    for _ in range(wish.count // wish.size):
        able = [node for node in there if seats[node] + apart.get(node, 0) + wish.size <= there[node]]
        if not able:
            raise BuildError(
                f"nodes={', '.join(wish.nodes)}: {wish.count} devices, {wish.size} of them together on one node, do "
                f"not fit beside what is there; they have {', '.join(f'{n} {node}' for node, n in there.items())}"
            )
        node = min(able, key=lambda one: (seats[one] + apart.get(one, 0), seats[one] - free[one]))
        seats[node] += wish.size
    return [([node], count) for node, count in seats.items()]


def _by_node(devices: list[Device], size: int) -> list[Device]:
    """Sort devices by node, that of this process first; refuse groups of `size` that are not on one node."""
    at = dict(zip(devices, addresses(devices), strict=True))
    own = cluster.node_address()
    order = sorted(dict.fromkeys(at.values()), key=lambda node: node != own)
    devices = sorted(devices, key=lambda device: order.index(at[device]))
    for i in range(0, len(devices), size):
        if len(nodes := {at[device] for device in devices[i : i + size]}) > 1:
            raise BuildError(
                f"a replica's {size} devices would be on {len(nodes)} nodes ({', '.join(sorted(nodes))}), and its "
                "tensor parallel workers share one: lower tensor_parallel_size, or name other nodes="
            )
    return devices


def _reserve(link: Link, count: int, size: int, node: str | None) -> list[Device]:
    """Take `count` devices from Ray, on that node; None: on as few as can be, `size` at a time on one."""
    bundle = {"GPU": 1.0} if cluster.current().gpus else {"CPU": CPU_SHARE}
    if node is not None:
        return _group(link, [bundle | {f"node:{node}": NODE_SHARE}] * count, "PACK")
    if size == 1 or count % size:
        return _group(link, [bundle] * count, "PACK")
    return [device for _ in range(count // size) for device in _group(link, [bundle] * size, "STRICT_PACK")]


def _group(link: Link, bundles: list[dict[str, float]], strategy: str) -> list[Device]:
    import ray

    name = f"rlbench/{link.name}/devices/{secrets.token_hex(3)}"
    group = ray.util.placement_group(bundles, strategy=strategy, name=name, lifetime="detached")
    try:
        if not group.wait(READY_LIMIT_S):
            raise BuildError(
                f"the cluster did not give {len(bundles)} more devices within {READY_LIMIT_S:g} s; another session "
                "holds them: see rb.resources() and `rlbench ps`"
            )
    except BaseException:
        ray.util.remove_placement_group(group)  # else it would seize the devices once they are free
        raise
    return [Device(name, i) for i in range(len(bundles))]
