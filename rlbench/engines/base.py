"""What both kinds of engine share: their place in a session, their workers, device states, closing."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from rlbench.dispatch.link import Link, spawn_host
from rlbench.dispatch.pending import Observer, Pending
from rlbench.dispatch.protocol import Progress, actor_name
from rlbench.engines.moved import Moved
from rlbench.engines.parallel import estimated_bytes
from rlbench.engines.placement import Device, actor_options, allot, devices_of, unshared
from rlbench.errors import BuildError, EngineError, SessionError, StateError, WorkerDied, nearest
from rlbench.runtime import cluster
from rlbench.runtime.starting import phase, say, starting

PUT_BYTES = 256 << 10
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one rank."""

_live: weakref.WeakSet[Engine] = weakref.WeakSet()
_anonymous: Link | None = None
_anonymous_cluster: cluster.Cluster | None = None


def anonymous_link() -> Link:
    """The session of engines built without one; it ends with this process, or with `rb.shutdown()`."""
    global _anonymous, _anonymous_cluster
    here = cluster.current()
    if _anonymous is None or _anonymous.closed or _anonymous_cluster != here:
        _anonymous, _anonymous_cluster = Link.create(), here
        cluster.on_shutdown(_anonymous.close)
        atexit.register(_anonymous.close)
    return _anonymous


def live_engines(kind: str) -> list[Engine]:
    """The engines of this kind that this kernel holds and that run, by session and name."""
    held = [engine for engine in _live if engine.KIND == kind and engine.built and not engine.link.closed]
    return sorted(held, key=lambda engine: (engine.link.name, engine.name))


class Engine:
    """Base of the engines. `name` is its role in the session (`actor`, `inference`, …), unique there."""

    KIND: ClassVar[str]
    COLLECTIVE: ClassVar[bool]
    """Whether workers wait for each other inside a call."""
    PARTS: ClassVar[tuple[str, ...]]

    def __init__(self, name: str, link: Link | None = None) -> None:
        self.name = name
        self._link = link
        self._actors: list[Any] = []
        self._pids: dict[str, int] = {}
        self._info: dict[str, Any] = {}
        _live.add(self)

    @property
    def built(self) -> bool:
        """True between `build()` and `close()`."""
        return bool(self._actors)

    @property
    def workers(self) -> list[Any]:
        """The actors, in the order of `labels`."""
        return list(self._actors)

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
        """What `build()` found: sizes, dtype, limits."""
        return dict(self._info)

    def device(self) -> str | dict[str, str]:
        """Where the engine is: one of `cuda`, `cpu`, `meta` when all parts agree, else each part's."""
        states = {part: self.status()[part] for part in self.PARTS}
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
        same = len(set(states.values())) == 1
        where = next(iter(states.values())) if same else ", ".join(f"{part} {at}" for part, at in states.items())
        count = f"{self.world_size} {self.labels[0].split()[0]}{'' if self.world_size == 1 else 's'}"
        return f"{count}, {where}" if where else count

    def status(self) -> dict[str, Any]:
        """The first worker's status, answered also while it is busy."""
        return dict(self.control("status")[0])

    def memory(self) -> list[dict[str, Any]]:
        """Measured bytes by owner, one dict per worker, answered also while they are busy."""
        return self.control("memory")

    def cuda(self, tags: str | Sequence[str] | None = None) -> Moved:
        """Make the engine, or the parts named by `tags`, resident; returns what was measured."""
        return self._to_state("cuda", tags)

    def cpu(self, tags: str | Sequence[str] | None = None) -> Moved:
        """Keep in host memory what cannot be rebuilt, release the rest; returns what was measured."""
        return self._to_state("cpu", tags)

    def meta(self, tags: str | Sequence[str] | None = None) -> Moved:
        """Release the memory; returns what was measured and what is lost."""
        return self._to_state("meta", tags)

    def to(self, device: str) -> Moved:
        """`cuda()`, `cpu()` or `meta()` by name."""
        if device not in ("cuda", "cpu", "meta"):
            raise StateError(f"to({device!r}): wanted 'cuda', 'cpu' or 'meta'")
        return self._to_state(device, None)

    def release_memory_cache(self, cpu: bool = False, gpu: bool = True) -> list[dict[str, int]]:
        """Give back memory that the workers' allocators keep for later; returns the bytes freed, one dict per worker.

        Args:
            cpu: of the host: pages that the C allocator keeps.
            gpu: of the GPU: blocks that torch keeps; a host without has none.
        """
        what = f"{self.name}.release_memory_cache()"
        return list(self.call_all("release_memory_cache", cpu, gpu, what=what).result())

    def control(self, name: str, *args: Any) -> list[Any]:
        """Ask every worker on its control lane. Raises WorkerDied where one is dead."""
        import ray

        self._need_built(name)
        refs = [actor.control.remote(name, *args) for actor in self._actors]
        found = []
        for label, actor, ref in zip(self.labels, self._actors, refs, strict=True):
            try:
                found.append(ray.get(ref, timeout=30))
            except ray.exceptions.RayActorError as error:
                raise self.link.died(self.name, label, actor, error) from None
        return found

    def call(
        self,
        name: str,
        calls: Sequence[Call],
        finish: Callable[[list[Any]], Any] = list,
        what: str | None = None,
        observer: Observer | None = None,
        queue_total: int = 0,
        track: bool = False,
    ) -> Pending:
        """Submit a call of the workers' own method `name`; `calls[i]` holds the arguments of worker i."""
        self._need_built(name)
        return self.link.submit(
            self.name,
            self.labels,
            self._actors,
            name,
            calls,
            finish,
            what or f"{self.name}.{name}",
            observer,
            queue_total,
            track,
            self.COLLECTIVE,
        )

    def call_all(self, name: str, *args: Any, **options: Any) -> Pending:
        """Submit the same call to every worker, large arguments once through shared memory."""
        return self.call(name, [(tuple(map(shared, args)), {})] * len(self._actors), **options)

    @property
    def labels(self) -> list[str]:
        """What the workers are called in output and errors."""
        return [f"rank {i}" for i in range(len(self._actors))]

    def close(self) -> None:
        """End the workers and free what they hold. Safe to call twice.

        Raises SessionError where another notebook drives the session now.
        """
        if not self._actors:
            return
        if self.link.closed:
            self._actors = []
            return
        self.link.apply()  # refused to a driver that was replaced
        import ray

        try:
            ray.get([a.call.remote(self._last_ticket(), "close", ()) for a in self._actors], timeout=20)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            pass  # busy or dead already: ending the process frees all but shared files, which the session's end removes
        self._discard()

    def _last_ticket(self) -> Any:
        from rlbench.dispatch.protocol import Ticket

        return Ticket(self.link.epoch, 0, f"close-{self.name}")

    def _to_state(self, state: str, tags: str | Sequence[str] | None) -> Moved:
        wanted = None if tags is None else [tags] if isinstance(tags, str) else list(tags)
        for tag in wanted or []:
            if tag not in self.PARTS:
                raise StateError(f"{state}({tag!r}): this engine's parts are {', '.join(self.PARTS)}")
        measured = self.call_all("to_state", state, wanted, what=f"{self.name}.{state}()", track=True).result()
        self.publish_state()
        self._after_state()
        return Moved.of(self.name, self.PARTS, measured)

    def _after_state(self) -> None:
        """What an engine has to make up for once its state changed."""

    def publish_state(self) -> None:
        """Tell the monitor the measured state, so that everybody sees the same."""
        self.link.engine(self.name, {"state": self.status()})

    def _need_built(self, name: str) -> None:
        if not self._actors:
            raise EngineError(f"{self.name}.{name}: the engine is not built; call {self.name}.build(…) first")

    def _stays_built(self, pipeline_parallel_size: int, ignore_rebuild_error: bool) -> bool:
        """Whether a call of `build` has nothing to do; BuildError where it cannot be done."""
        if pipeline_parallel_size != 1:
            raise BuildError(
                f"pipeline_parallel_size={pipeline_parallel_size}: a model is not split by its layers here, 1 is the "
                "only size; use tensor_parallel_size and data_parallel_size"
            )
        if self._actors and not ignore_rebuild_error:
            raise BuildError(
                f"{self.name} is built already: use it, or {self.name}.close() before building again "
                "(ignore_rebuild_error=True leaves it as it is)"
            )
        return bool(self._actors)

    def _allot(
        self, count: int, colocate_with: Engine | None, not_colocate_with: Engine | None, alone: bool = False
    ) -> list[Device]:
        if alone and colocate_with is not None:
            raise BuildError("allow_colocate=False and colocate_with= contradict each other: give one of them")
        if count < 1:
            raise BuildError(f"the engine wants {count} workers: parallel sizes are 1 or more (-1: all devices)")
        for other in (colocate_with, not_colocate_with):
            if other is not None and not other.built:
                raise BuildError(f"cannot place {self.name} beside {other.name}: that engine is not built yet")
            if other is not None and other.link is not self.link:
                raise BuildError(f"cannot place {self.name} beside {other.name}: they are in different sessions")
        with self.link.placing:  # engines of a session may be built at the same time
            state = self.link.state()
            if self.name in state["engines"]:
                raise BuildError(f"the session has an engine {self.name!r} already: give this one another name=")
            near = devices_of(state, colocate_with.name) if colocate_with else []
            avoid = devices_of(state, not_colocate_with.name) if not_colocate_with else []
            if set(near) & set(unshared(state)):
                raise BuildError(f"cannot place {self.name} beside an engine built with allow_colocate=False")
            devices = allot(self.link, count, near, [*avoid, *unshared(state)], alone)
            self.link.engine(
                self.name,
                {
                    "kind": self.KIND,
                    "devices": [[d.placement, d.bundle] for d in devices],
                    "alone": alone,
                    "placements": sorted({d.placement for d in devices}),
                    "broken": None,
                },
            )
        return devices

    def _spawn(
        self,
        target: str,
        args_of: Callable[[int], tuple[Any, ...]],
        devices: Sequence[Device],
        env: Sequence[dict[str, str]],
    ) -> None:
        """Start the workers and record them."""
        import ray

        for i, device in enumerate(devices):
            self._actors.append(spawn_host(self.link, self.name, i, target, args_of(i), env[i], actor_options(device)))
        say(self.name, f"starting {len(self._actors)} process{'' if len(self._actors) == 1 else 'es'}")
        pids = ray.get([a.pid.remote() for a in self._actors], timeout=180)
        names = [actor_name(self.link.name, self.name, i) for i in range(len(self._actors))]
        self._pids = dict(zip(names, pids, strict=True))
        self.link.engine(self.name, {"actors": names, "pids": self._pids})

    @contextlib.contextmanager
    def _building(self) -> Iterator[None]:
        """From the first device on: when anything fails, nothing of the engine stays, and its name is free again."""
        with starting(f"engine {self.name}"), phase(self.name, "starting"):
            try:
                yield
            except BaseException:
                self._discard()
                raise

    def _say_phase(self, progress: list[Progress]) -> None:
        """Tell what the workers are at while they build."""
        phases = [str(p.values["phase"]) for p in progress if p.values.get("phase")]
        if phases:
            say(self.name, phases[0])

    def discard(self) -> None:
        """End the workers at once, dead ones among them, and give their devices back; they are not asked to finish."""
        self._discard()

    def _discard(self) -> None:
        """End the workers, drop the record, and with it the devices."""
        import ray

        for actor in self._actors:
            if not isinstance(actor, DeadActor):
                ray.kill(actor)
        self._actors = []
        self.link.engine(self.name, None)

    def _adopt(self, record: dict[str, Any]) -> None:
        """Hold the workers of a record, for a kernel that came back or a rank that asks."""
        import ray

        self._actors = [_actor_or_dead(ray, name) for name in record["actors"]]
        self._info, self._pids = dict(record["info"]), dict(record["pids"])


class DeadActor:
    """In the place of a worker that died before this kernel came: every call to it says so."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return DeadMethod(self._name)


class DeadMethod:
    """A method of a worker that is no more."""

    def __init__(self, name: str) -> None:
        self._name = name

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Raise, naming the worker and the mend."""
        raise WorkerDied(f"worker {self._name} died before this kernel attached: session.heal() rebuilds its engine")


def _actor_or_dead(ray: Any, name: str) -> Any:
    try:
        return ray.get_actor(name)
    except ValueError:  # Ray forgets the name of an actor that died
        return DeadActor(name)


def executor_of(given: str, known: Iterable[str], kind: str) -> str:
    """The executor's name, from itself in any case or from RLite's class of it (`Fsdp2TrainExecutor`)."""
    name = given.lower().removesuffix("executor").removesuffix(kind.lower().removesuffix("engine"))
    if name not in known:
        raise BuildError(f"executor={given!r}: {kind} has {', '.join(known)}{nearest(given, known)}")
    return name


def shared(value: Any) -> Any:
    """Put a large value into shared memory once, to be read by every worker without a copy of arrays."""
    if estimated_bytes(value) < PUT_BYTES:
        return value
    import ray

    return ray.put(value)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))
