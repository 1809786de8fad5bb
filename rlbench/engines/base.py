"""What both kinds of engine share: their place in a session, their workers, device states, closing."""

from __future__ import annotations

import atexit
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self

from rlbench.dispatch.link import Link, spawn_host
from rlbench.dispatch.pending import Pending
from rlbench.dispatch.protocol import Progress, Ticket, actor_name
from rlbench.engines.moved import Moved
from rlbench.engines.parallel import Arguments, estimated_bytes
from rlbench.engines.placement import Device, Wish, actor_options, addresses, device_count, place
from rlbench.errors import BuildError, EngineError, SessionError, StateError, WorkerDied, nearest
from rlbench.runtime import cluster
from rlbench.runtime.starting import phase, say, starting

PUT_BYTES = 256 << 10
START_LIMIT_S, ANSWER_LIMIT_S = 600.0, 300.0  # of workers that live: one that died is known of at once
Start = Callable[[list[Device]], dict[str, Any]]
"""Starts the workers of an engine on its devices, and returns what they say of themselves, `methods` among it."""

_live: weakref.WeakSet[Engine] = weakref.WeakSet()
_anonymous: tuple[Link, cluster.Cluster] | None = None


def anonymous_link() -> Link:
    """Return the session of engines built without one; it ends with this process, or with `rb.shutdown()`."""
    global _anonymous
    here = cluster.current()
    if _anonymous is None or _anonymous[0].closed or _anonymous[1] != here:
        _anonymous = Link.create(), here
        cluster.on_shutdown(_anonymous[0].close)
        atexit.register(_anonymous[0].close)
    return _anonymous[0]


def live_engines(kind: str) -> list[Engine]:
    """Return the engines of this kind that this kernel holds and that run, by session and name."""
    live = [engine for engine in _live if engine.KIND == kind and engine.built and not engine.link.closed]
    return sorted(live, key=lambda engine: (engine.link.name, engine.name))


class Engine(ABC):
    """Base of the engines. `name` is its role in the session (`actor`, `inference`, …), unique there."""

    KIND: ClassVar[str]
    LABEL: ClassVar[str]
    """What a worker is called in output and errors."""
    COLLECTIVE: ClassVar[bool]
    """Whether workers wait for each other inside a call."""
    PARTS: ClassVar[tuple[str, ...]]

    def __init__(self, name: str, link: Link | None, config: dict[str, Any]) -> None:
        self.name = name
        self._link = link
        self._config = config
        self._actors: list[Any] = []
        self._pids: dict[str, int] = {}
        self._nodes: list[str] = []
        self._info: dict[str, Any] = {}
        _live.add(self)

    def build(
        self,
        *,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = -1,
        colocate_with: Engine | None = None,
        not_colocate_with: Engine | None = None,
        allow_colocate: bool = True,
        pipeline_parallel_size: int = 1,
        ignore_rebuild_error: bool = False,
        nodes: str | Sequence[str] = (),
        **config: Any,
    ) -> Self:
        """Start the workers, with the model on them.

        Args:
            tensor_parallel_size: devices one replica is spread over; ranks the parameters are sharded over (data is
                split over them as well).
            data_parallel_size: number of replicas; -1: as many as there are devices for; of inference on a host
                without a GPU one, as replicas there would share the same cores.
            colocate_with, not_colocate_with: engines whose devices to share, or to leave alone.
            allow_colocate: False: devices that no engine of the session shares, now or later.
            pipeline_parallel_size: 1, there is no other.
            ignore_rebuild_error: True: where the engine is built already, nothing happens.
            nodes: of a cluster of several: as few as can be; `"spread"`: as many as can be; or their addresses. The
                tensor parallel workers of a replica are on one node.
            config: fields of `TrainConfig` or `ReplicaConfig`, in place of the constructor's.
        """
        if pipeline_parallel_size != 1:
            raise BuildError(f"pipeline_parallel_size={pipeline_parallel_size}: no model is split by its layers here")
        if self._actors:
            if ignore_rebuild_error:
                return self
            raise BuildError(f"{self.name} is built already: use it, or {self.name}.close() before building again")
        nodes = (nodes,) if isinstance(nodes, str) else tuple(nodes)
        there = device_count(nodes)
        count, start = self._prepared(tensor_parallel_size, data_parallel_size, there, self._config | config)
        wish = Wish(
            count,
            tensor_parallel_size if self.KIND == "inference" else 1,
            colocate_with.name if colocate_with else None,
            not_colocate_with.name if not_colocate_with else None,
            not allow_colocate,
            nodes,
        )
        devices = self._allot(wish, [colocate_with, not_colocate_with])
        with starting(f"engine {self.name}"), phase(self.name, "starting"):
            try:
                info = start(devices)
            except BaseException:
                self.discard()
                raise
        methods = info.pop("methods", [])
        self._info = info
        self.link.engine(self.name, {"info": info, "methods": methods, "state": self.status()})
        return self

    @abstractmethod
    def _prepared(
        self, tensor_parallel_size: int, data_parallel_size: int, devices: int, options: dict[str, Any]
    ) -> tuple[int, Start]:
        """Check all that can be checked before devices are taken (there are so many); return how many, and what starts
        workers on them."""

    @property
    def built(self) -> bool:
        """True between `build()` and `close()`."""
        return bool(self._actors)

    @property
    def workers(self) -> list[Any]:
        """The actors, in the order of `labels`."""
        return list(self._actors)

    @property
    def labels(self) -> list[str]:
        """What the workers are called in output and errors."""
        return [f"{self.LABEL} {i}" for i in range(len(self._actors))]

    @property
    def nodes(self) -> list[str]:
        """The address of each worker's node, in the order of `labels`."""
        return list(self._nodes)

    @property
    def link(self) -> Link:
        """The session this engine lives in."""
        if self._link is None:
            self._link = anonymous_link()
        return self._link

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._actors)

    @property
    def info(self) -> dict[str, Any]:
        """What `build()` learnt: sizes, dtype, limits."""
        return dict(self._info)

    def device(self) -> str | dict[str, str]:
        """Where the engine is: one of `cuda`, `cpu`, `meta` when all parts agree, else each part's."""
        status = self.status()
        states = {part: status[part] for part in self.PARTS}
        return next(iter(states.values())) if len(set(states.values())) == 1 else states

    def described(self) -> str:
        """Where the engine is, as its session's monitor knows it: no worker is asked, so this never waits for one."""
        if not self.built:
            return "not built"
        try:
            state = self.link.state("engines")["engines"].get(self.name, {}).get("state", {})
        except SessionError as gone:
            return str(gone)
        states = {part: state[part] for part in self.PARTS if part in state}
        where = ", ".join(f"{part} {at}" for part, at in states.items())
        if len(set(states.values())) == 1:
            where = next(iter(states.values()))
        count = f"{self.world_size} {self.LABEL}{'' if self.world_size == 1 else 's'}"
        return f"{count}, {where}" if where else count

    def status(self) -> dict[str, Any]:
        """The first worker's status, answered also while it is busy."""
        return dict(self.control("status")[0])

    def memory(self) -> list[dict[str, Any]]:
        """Measured bytes by owner, one dict per worker, answered also while they are busy."""
        return self.control("memory")

    def cuda(self, tags: str | Sequence[str] | None = None) -> Moved:
        """Make the engine, or the parts named by `tags`, resident; returns what was measured."""
        return self.to("cuda", tags)

    def cpu(self, tags: str | Sequence[str] | None = None) -> Moved:
        """Keep in host memory what cannot be rebuilt, release the rest; returns what was measured."""
        return self.to("cpu", tags)

    def meta(self, tags: str | Sequence[str] | None = None) -> Moved:
        """Release the memory; returns what was measured and what is lost."""
        return self.to("meta", tags)

    def to(self, device: str, tags: str | Sequence[str] | None = None) -> Moved:
        """`cuda()`, `cpu()` or `meta()` by name."""
        if device not in ("cuda", "cpu", "meta"):
            raise StateError(f"to({device!r}): wanted 'cuda', 'cpu' or 'meta'")
        parts = None if tags is None else [tags] if isinstance(tags, str) else list(tags)
        for tag in parts or []:
            if tag not in self.PARTS:
                raise StateError(f"{device}({tag!r}): this engine's parts are {', '.join(self.PARTS)}")
        measured = self.call_all("to_state", device, parts, what=f"{self.name}.{device}()", track=True).result()
        self.publish_state()
        return Moved.of(self.name, self.PARTS, measured)

    def publish_state(self) -> None:
        """Tell the monitor the measured state, so that everybody sees the same."""
        self.link.engine(self.name, {"state": self.status()})

    def note_info(self, **changed: Any) -> None:
        """Show what else the engine is now than it was built as."""
        self._info = self._info | changed
        self.link.engine(self.name, {"info": self._info})

    def release_memory_cache(self, cpu: bool = False, gpu: bool = True) -> list[dict[str, int]]:
        """Give back memory that the workers' allocators keep for later, of the host or the GPU; returns the bytes
        freed, one dict per worker."""
        return list(self.call_all("release_memory_cache", cpu, gpu).result())

    def control(self, name: str, *args: Any) -> list[Any]:
        """Ask every worker on its control lane; a dead one raises WorkerDied."""
        return self._answers(self._asked(name, *args))

    def controls(self, *names: str) -> list[list[Any]]:
        """Ask several things at a time, as `control` asks one."""
        return [self._answers(refs) for refs in [self._asked(name) for name in names]]

    def _asked(self, name: str, *args: Any) -> list[Any]:
        self._need_built(name)
        return [actor.control.remote(name, *args) for actor in self._actors]

    def _answers(self, refs: Sequence[Any]) -> list[Any]:
        import ray

        answers = []
        for label, actor, ref in zip(self.labels, self._actors, refs, strict=True):
            try:
                answers.append(ray.get(ref, timeout=ANSWER_LIMIT_S))
            except ray.exceptions.RayActorError as error:
                raise self.link.died(self.name, label, actor, error) from None
        return answers

    def call(
        self,
        name: str,
        calls: Sequence[Arguments],
        finish: Callable[[list[Any]], Any] = list,
        what: str | None = None,
        **options: Any,
    ) -> Pending:
        """Submit a call of the workers' own method `name`; `calls[i]` holds the arguments of worker i, `options` are
        those of `Link.submit`."""
        self._need_built(name)
        what = what or f"{self.name}.{name}"
        options = {"collective": self.COLLECTIVE} | options
        return self.link.submit(self.name, self.labels, self._actors, name, calls, finish, what, **options)

    def call_all(self, name: str, *args: Any, **options: Any) -> Pending:
        """Submit the same call to every worker, large arguments once through shared memory."""
        return self.call(name, [(tuple(map(shared, args)), {})] * len(self._actors), **options)

    def close(self) -> None:
        """End the workers and free what they hold. Safe to call twice; refused where another notebook drives the
        session now."""
        if self._actors and self.link.closed:
            self._actors = []
        if not self._actors:
            return
        self.link.apply()  # refused to a driver that was replaced
        import ray

        sent, _ = Ticket(self.link.epoch, 0, f"close-{self.name}").sent("close")
        try:
            ray.get([a.call.remote(sent) for a in self._actors], timeout=20)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError, WorkerDied):
            pass  # busy or dead already: ending the process frees all but shared files, which the session's end removes
        self.discard()

    def discard(self) -> None:
        """End the workers at once, dead ones among them, and give their devices back; they are not asked to finish."""
        self._end(0)
        self.link.engine(self.name, None)

    def _end(self, first: int) -> None:
        """End the workers from number `first` on at once."""
        import ray

        for actor in self._actors[first:]:
            if not isinstance(actor, DeadActor):
                ray.kill(actor)
        del self._actors[first:], self._nodes[first:]

    def _need_built(self, name: str) -> None:
        if not self._actors:
            raise EngineError(f"{self.name}.{name}: the engine is not built; call {self.name}.build(…) first")

    def _allot(self, wish: Wish, others: Sequence[Engine | None] = ()) -> list[Device]:
        """Take devices, and with them the engine's name in the session."""
        for other in others:
            if other is not None and not other.built:
                raise BuildError(f"cannot place {self.name} beside {other.name}: that engine is not built yet")
            if other is not None and other.link is not self.link:
                raise BuildError(f"cannot place {self.name} beside {other.name}: they are in different sessions")
        with self.link.placing:  # engines of a session may be built at the same time
            if self.name in self.link.state("engines")["engines"]:
                raise BuildError(f"the session has an engine {self.name!r} already: give this one another name=")
            devices = place(self.link, wish)
            fixed = {"kind": self.KIND, "label": self.LABEL, "alone": wish.alone, "wished": list(wish.nodes)}
            self.link.engine(self.name, fixed | {"broken": None, **_held(devices)})
        return devices

    def _allot_more(self, count: int, size: int) -> list[Device]:
        """Take further devices, none of which the engine has already."""
        with self.link.placing:
            record = self.link.state("engines")["engines"][self.name]
            wished = tuple(record["wished"])
            devices = place(self.link, Wish(count, size, None, self.name, bool(record["alone"]), wished))
            self.link.engine(self.name, _held([*(Device(*pair) for pair in record["devices"]), *devices]))
        return devices

    def _shrink(self, workers: int, size: int) -> None:
        """End all workers but the first so many, of `size` devices each, and give the devices of the others back."""
        self._end(workers)
        record = self.link.state("engines")["engines"][self.name]
        names = list(record["actors"])[:workers]
        self._pids = {name: record["pids"][name] for name in names}
        held = _held([Device(*pair) for pair in record["devices"]][: workers * size])
        self.link.engine(self.name, {"actors": names, "pids": self._pids, "nodes": self._nodes, **held})

    def _spawn(
        self, target: str, args: Sequence[tuple[Any, ...]], devices: Sequence[Device], env: Sequence[dict[str, str]]
    ) -> None:
        """Start workers, after those there are, and record them."""
        import ray

        first = len(self._actors)
        for i, device in enumerate(devices):
            options = actor_options(device)
            self._actors.append(spawn_host(self.link, self.name, first + i, target, args[i], env[i], options))
        say(self.name, f"starting {len(devices)} process{'' if len(devices) == 1 else 'es'}")
        pids = ray.get([a.pid.remote() for a in self._actors], timeout=START_LIMIT_S)
        names = [actor_name(self.link.name, self.name, i) for i in range(len(self._actors))]
        self._pids = dict(zip(names, pids, strict=True))
        self._nodes += addresses(devices)
        self.link.engine(self.name, {"actors": names, "pids": self._pids, "nodes": self._nodes})

    def _say_phase(self, progress: list[Progress]) -> None:
        """Tell what the workers are at while they build."""
        phases = [str(p.values["phase"]) for p in progress if p.values.get("phase")]
        if phases:
            say(self.name, phases[0])

    def _adopt(self, record: dict[str, Any]) -> None:
        """Hold the workers of a record, for a kernel that came back or a rank that asks."""
        import ray

        self._actors = []
        for name in record["actors"]:
            try:
                self._actors.append(ray.get_actor(name))
            except ValueError:  # Ray forgets the name of an actor that died
                self._actors.append(DeadActor(name))
        self._info, self._pids, self._nodes = dict(record["info"]), dict(record["pids"]), list(record["nodes"])


def _held(devices: Sequence[Device]) -> dict[str, Any]:
    """Return what an engine's record says of its devices."""
    placements = sorted({device.placement for device in devices})
    return {"devices": [[d.placement, d.bundle] for d in devices], "placements": placements}


class DeadActor:
    """In the place of a worker that died before this kernel came: every call to it says so."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        raise WorkerDied(f"worker {self._name} died before this kernel attached: session.heal() rebuilds its engine")


def executor_of(executor: str, known: Iterable[str], kind: str) -> str:
    """Return the executor's name, from itself in any case or from RLite's class of it (`Fsdp2TrainExecutor`)."""
    name = executor.lower().removesuffix("executor").removesuffix(kind.lower().removesuffix("engine"))
    if name not in known:
        raise BuildError(f"executor={executor!r}: {kind} has {', '.join(known)}{nearest(executor, known)}")
    return name


def shared(value: Any) -> Any:
    """Put a large value into shared memory once, to be read by every worker without a copy of arrays."""
    if estimated_bytes(value) < PUT_BYTES:
        return value
    import ray

    return ray.put(value)


def cores() -> int:
    """Count the cores this process may use."""
    return len(os.sched_getaffinity(0))


def replicas_for(asked: int, size: int, devices: int) -> int:
    """Return how many replicas of `size` devices there are to be; asked for -1: as many as there are devices for."""
    if size < 1 or (asked < 1 and asked != -1):
        raise BuildError(f"{asked} replicas of {size} devices: parallel sizes are 1 or more (-1: all devices)")
    return max(1, devices // size) if asked == -1 else asked
