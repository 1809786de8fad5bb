"""A driver's end of a session: its lease and epoch, one total order of calls, actors by name."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import pkgutil
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlbench.dispatch.chain import Steps
from rlbench.dispatch.failures import cluster_ended, final_fate, obituary
from rlbench.dispatch.pending import Observer, Pending, sigint_held
from rlbench.dispatch.protocol import Ticket, actor_name
from rlbench.errors import ClusterEnded, EngineError, SessionError
from rlbench.runtime import cluster, processes, registry
from rlbench.sendable import is_refusal, why_not
from rlbench.traces import ipython

MONITOR = "rlbench.monitor.actor:Monitor"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
BEAT_S = 5.0
MONITOR_LIMIT_S = 300.0
"""How long a monitor may take for an answer: on a busy machine long, and one that has ended is known of at once."""
LOOK_S = 2.0
"""After which it is looked whether the cluster is still there."""
Noting = Callable[[str, str, tuple[Any, ...], dict[str, Any]], contextlib.AbstractContextManager[Any]]
"""Keeps a record of what a user does with an engine itself: its name, the method, and the arguments."""


class Link:
    """Drives session `name`; the driver's own (`drives`) holds the session's lease, and may end it."""

    def __init__(self, name: str, monitor: Any, epoch: int, drives: bool = True) -> None:
        self.name = name
        self.monitor = monitor
        self.epoch = epoch
        # of one epoch there may be several drivers, whose calls are told apart by their numbers
        self._seq = itertools.count(1 if drives else secrets.randbits(40) << 20)
        self.placing = threading.Lock()
        self._submitting = threading.Lock()  # all ranks see the calls of several threads in one order
        self._renewing = threading.Lock()
        self._closed = threading.Event()
        self._drives = drives
        self.noting: Noting = lambda engine, name, args, kwargs: contextlib.nullcontext()
        self._verb = threading.local()  # the one that this thread makes the calls of
        if drives:
            threading.Thread(target=self._beat, daemon=True).start()

    @classmethod
    def create(cls, name: str | None = None, lease_s: float | None = None) -> Link:
        """Start a session's monitor and drive it; `lease_s`: how long it outlives its driver (None: the default)."""
        import ray

        joined = cluster.current()
        name = name or f"anonymous-{secrets.token_hex(3)}"
        if not NAME.fullmatch(name):
            raise SessionError(f"session name {name!r}: use letters, digits, '.', '_' and '-', at most 64")
        if _monitor_of(name) is not None:
            raise SessionError(f"session {name!r} is there already: rb.attach({name!r}) drives it")
        registry.journal_file(name).unlink(missing_ok=True)
        shutil.rmtree(registry.snapshot_folder(name), ignore_errors=True)  # of one whose machine went down
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        monitor = (
            _actor_class(pkgutil.resolve_name(MONITOR))
            .options(
                name=actor_name(name, "monitor"),
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=2,
                max_concurrency=16,
                scheduling_strategy=here,
            )
            .remote(name, joined.id, shm_prefix(name))
        )
        try:
            return cls(name, monitor, _drive(name, monitor, False, lease_s))
        except BaseException:  # an interrupt: a monitor that nobody drives would keep the name
            ray.kill(monitor)
            registry.forget_session(name)
            raise

    @classmethod
    def attach(cls, name: str | None = None, take_over: bool = False) -> Link:
        """Drive a session that is there. Without a name: the only one. Raises SessionError saying which there are."""
        known = [session["name"] for session in registry.live_sessions(cluster.current().id)]
        parked = [session["name"] for session in registry.parked_sessions()]
        there = f"there are {known or 'none'}" + (f", and parked {parked}" if parked else "")
        if name is None:
            if len(known) != 1:
                raise SessionError(f"which session? {there}: rb.attach(name)")
            name = known[0]
        monitor = _need_monitor(name, f"; {there}")
        return cls(name, monitor, _drive(name, monitor, take_over))

    @classmethod
    def operate(cls, name: str, epoch: int) -> Link:
        """Drive a session for one control verb, under the epoch its monitor gave out for that; its driver stays."""
        return cls(name, _need_monitor(name), epoch, drives=False)

    @staticmethod
    def exists(name: str) -> bool:
        """Whether a session of this name runs on the cluster."""
        cluster.current()
        return _monitor_of(name) is not None

    @staticmethod
    def look(name: str, *keys: str) -> dict[str, Any]:
        """Return parts of the state of a session, without driving it."""
        return dict(_answer_of(_need_monitor(name).state.remote(*keys), name))

    @property
    def closed(self) -> bool:
        """True once `close()` was called here."""
        return self._closed.is_set()

    def state(self, *keys: str) -> dict[str, Any]:
        """Return the session's state, or the parts of it that are named, from its owner."""
        return self.asking(*keys)()

    def asking(self, *keys: str) -> Callable[[], dict[str, Any]]:
        """Ask for what `state` returns; the function that is returned waits for it."""
        return self._asked("state", *keys)

    def apply(self, *events: dict[str, Any]) -> None:
        """Change the session's state; each event counts once, also where a monitor that restarts is asked again."""
        self.applying(*events)()

    def applying(self, *events: dict[str, Any]) -> Callable[[], Any]:
        """Send changes as `apply` does; the function that is returned waits until they are made."""
        return self._asked("apply", self.epoch, *({"id_once": secrets.token_hex(8)} | event for event in events))

    def tell(self, event: dict[str, Any]) -> None:
        """Send an event that nothing depends on, without waiting; a driver that was replaced is not heard."""
        self.monitor.tell.remote(self.epoch, {"id_once": secrets.token_hex(8)} | event)

    def set(self, **values: Any) -> None:
        """Set top-level values of the session's state."""
        self.apply(*({"do": "set", "key": k, "value": v} for k, v in values.items()))

    def next_rollout(self) -> int:
        """Count one more rollout and return its number, which no other has, also from another thread."""
        return int(self._ask("next_rollout", self.epoch))

    def steps(self, known: int) -> tuple[int | None, list[dict[str, Any]]]:
        """Return the number of the step record at which the session stands, and those from number `known` on."""
        tip, fresh = self._ask("steps", known)
        return tip, list(fresh)

    def engine(self, name: str, fields: dict[str, Any] | None) -> None:
        """Set fields of an engine's record; None drops the engine."""
        self.apply({"do": "engine", "name": name, "fields": fields})

    def samples(self, since: float = 0.0, last: int | None = None) -> list[dict[str, Any]]:
        """Return the memory samples newer than `since`, the `last` of them where not all are wanted."""
        return list(self._ask("samples", since, last))

    def submit(
        self,
        engine: str,
        labels: Sequence[str],
        actors: Sequence[Any],
        name: str,
        calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        finish: Callable[[list[Any]], Any],
        what: str | None = None,
        observer: Observer | None = None,
        queue_total: int = 0,
        track: bool = False,
        collective: bool = True,
    ) -> Pending:
        """Send one call to all actors of an engine: `calls[i]` = (args, kwargs) of rank i. `queue_total` > 0 lets the
        first actor hand out so many shared work items; `track` shows the call at the monitor as running."""
        if self.closed:
            raise SessionError(f"session {self.name!r} is closed")
        call_id, sent = secrets.token_hex(6), 0
        verb_id = getattr(self._verb, "id", "")
        queue = actor_name(self.name, engine, 0) if queue_total else ""

        def send(ranks: Sequence[int]) -> list[Any]:
            nonlocal sent
            sent = self.epoch
            ticket = Ticket(sent, next(self._seq), call_id, len(actors), queue, queue_total, track)
            if track:
                self.monitor.begin.remote(call_id, what or name, engine, sent, verb_id)
            asked = ((actors[i], *ticket.sent(name, *calls[i])) for i in ranks)
            return [actor.call.remote(sent_call, *beside) for actor, sent_call, beside in asked]

        def again(ranks: Sequence[int]) -> list[Any] | None:
            if not self._renew(sent):
                return None
            with self._submitting:
                return send(ranks)

        # one worker has a call or has not, and nobody else was told of it: to hold Ctrl-C costs a twentieth of the call
        held = sigint_held() if len(actors) > 1 or track else contextlib.nullcontext()
        try:
            with held, self._submitting:
                refs = send(range(len(actors)))
        except (TypeError, pickle.PicklingError) as error:  # Ray's, of an argument; nothing of the call went out
            if not is_refusal(error):
                raise
            raise EngineError(why_not(f"an argument of {what or name}", list(calls), error, "the workers")) from None
        except KeyboardInterrupt:  # it came while the call went out: nobody would hold it
            for actor in actors:
                actor.stop.remote(call_id)
            raise

        def died(i: int, error: BaseException) -> BaseException:
            return self.died(engine, labels[i], actors[i], error)

        return Pending(
            what or f"{engine}.{name}", labels, actors, refs, call_id, finish, observer, died, collective, again
        )

    def held(self, what: str, steps: Steps) -> Steps:
        """Show `what` as running also between its calls, on one thread: a stop in between reaches the next of them."""
        verb_id, around = secrets.token_hex(6), getattr(self._verb, "id", "")
        self.monitor.begin_verb.remote(verb_id, what, self.epoch)
        self._verb.id = verb_id
        try:
            return (yield from steps)
        finally:
            self._verb.id = around
            self.monitor.end_verb.remote(verb_id)

    def pause(self, paused: bool) -> None:
        """Hold all generation where it is, or let it go on."""
        self._ask("pause", paused)

    def stop_running(self) -> list[str]:
        """Set the stop flag of every call that runs, also one of an earlier driver; returns what they are."""
        return list(self._ask("stop_running"))

    def close(self) -> None:
        """End the session and everything in it; of one that somebody else drives now, only let go. Safe to repeat."""
        if self.closed or not self._drives:
            self._closed.set()
            return
        import ray

        try:
            ended = _answer_of(self.monitor.close.remote(self.epoch), self.name)
        except ray.exceptions.RayActorError:  # gone already: the workers end themselves then
            ended = True
        except ClusterEnded:  # and all of the session with it: nobody can be asked
            ended = False
        self._closed.set()
        if ended:
            await_end(self.name)

    def release(self) -> None:
        """Stop driving; the session lives on."""
        self._closed.set()

    def died(self, engine: str, label: str, worker: Any, error: BaseException) -> BaseException:
        """Return what to raise for an `error` of Ray's: a `WorkerDied`, unless the worker answers again."""
        fate = final_fate(worker, error)
        if cluster.has_ended():
            return cluster_ended(self.name)
        if fate is None:
            return EngineError(
                f"{label} of {engine} could not be reached while it ran this call, and answers again: whether the call "
                "was done is not known. Look at the engine before you go on"
            )
        error, actor, pid, samples, in_session = fate, "", None, [], False
        with contextlib.suppress(SessionError):  # the monitor may be gone as well: the death is what to tell
            self.engine(engine, {"broken": f"{label} died"})
            state = self.state("engines", "config")
            actor = actor_name(self.name, engine, int(label.split()[-1]))
            pid = state["engines"].get(engine, {}).get("pids", {}).get(actor)
            samples, in_session = self.samples(), bool(state["config"])
        return obituary(label, engine, pid, error, samples, actor, in_session)

    def _renew(self, stale: int) -> bool:
        """Have an epoch later than `stale`; False while a control verb runs, after which one is to be had."""
        with self._renewing:
            if self.epoch <= stale:
                granted = self._ask("renew", self.epoch)
                if granted is None:
                    return False
                self.epoch = int(granted)
            return True

    def _ask(self, name: str, *args: Any) -> Any:
        return self._asked(name, *args)()

    def _asked(self, name: str, *args: Any) -> Callable[[], Any]:
        """Send a question; what is returned waits for the answer."""
        return functools.partial(self._answer, getattr(self.monitor, name).remote(*args))

    def _answer(self, asked: Any) -> Any:
        import ray

        try:
            return _answer_of(asked, self.name)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, SessionError) else error from None
        except ray.exceptions.GetTimeoutError:
            silent = f"the monitor of session {self.name!r} lives, but has not answered for {MONITOR_LIMIT_S:g} s"
            raise SessionError(f"{silent}: call again, or end it with `rlbench kill {self.name}`") from None
        except ray.exceptions.RayActorError:
            if registry.parked(self.name) is not None:
                said = f"is parked, its engines have ended: rb.attach({self.name!r}) brings it back"
                raise SessionError(f"session {self.name!r} {said}") from None
            raise SessionError(f"session {self.name!r} is gone: its monitor does not run any more") from None

    def _beat(self) -> None:
        import ray

        while not self._closed.wait(BEAT_S):
            if not ray.is_initialized():
                return
            try:
                if not ray.get(self.monitor.beat.remote(self.epoch), timeout=60):
                    return
            except ray.exceptions.GetTimeoutError:
                if cluster.has_ended():
                    return
                continue  # a busy machine: the next beat tells
            except ray.exceptions.RayError:
                return  # the session or the cluster is gone: the next verb says so


def spawn_host(
    link: Link, engine: str, rank: int, target: str, args: tuple[Any, ...], env: dict[str, str], options: dict[str, Any]
) -> Any:
    """Start one worker actor of an engine, detached, with its two lanes. `options` are Ray's (placement)."""
    from rlbench.dispatch.host import Host

    name = actor_name(link.name, engine, rank)
    host = _actor_class(Host, compute=1, control=4)
    return host.options(name=name, lifetime="detached", max_restarts=0, **options).remote(
        name, actor_name(link.name, "monitor"), env, target, args, cluster.current().id
    )


@functools.cache
def _actor_class(cls: type, **lanes: int) -> Any:
    """Return Ray's actor class of a class, once: Ray disassembles each, and warns of one that it was told often."""
    import ray

    return ray.remote(concurrency_groups=lanes)(cls) if lanes else ray.remote(cls)


def shm_prefix(session: str) -> str:
    """Return how the names of a session's shared-memory files begin; no session's is the start of another's."""
    return f"{cluster.current().shm_prefix}{session}:"


def _answer_of(asked: Any, session: str) -> Any:
    """Return what a session's monitor was asked; GetTimeoutError of Ray's after MONITOR_LIMIT_S.

    Raises:
        ClusterEnded: as soon as the cluster has: Ray itself would wait for it to come back.
    """
    import ray

    deadline = time.monotonic() + MONITOR_LIMIT_S
    while True:
        left = deadline - time.monotonic()
        try:
            return ray.get(asked, timeout=max(0.0, min(LOOK_S, left)))
        except ray.exceptions.GetTimeoutError:
            if cluster.has_ended():
                raise cluster_ended(session) from None
            if left <= LOOK_S:
                raise


def _drive(name: str, monitor: Any, take_over: bool, lease_s: float | None = None) -> int:
    import ray

    started = processes.start_time(os.getpid())
    driver = {"id": _DRIVER_ID, "pid": os.getpid(), "started": started, "mode": driver_mode()}
    if lease_s is None and "RLBENCH_LEASE_S" in os.environ:
        lease_s = float(os.environ["RLBENCH_LEASE_S"])
    driver |= {} if lease_s is None else {"lease_s": lease_s}
    try:
        return int(_answer_of(monitor.drive.remote(driver, take_over), name))
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, SessionError) else error from None


def driver_mode() -> str:
    """`notebook` in an IPython kernel, else `script`: what decides how long a session outlives its driver."""
    return "notebook" if hasattr(ipython(), "kernel") else "script"


def _monitor_of(name: str) -> Any | None:
    import ray

    try:
        return ray.get_actor(actor_name(name, "monitor"))
    except ValueError:
        return None


def await_end(name: str) -> None:
    """Wait until the monitor of a session that was closed is gone, so that its name is free."""
    deadline = time.monotonic() + 10.0
    while _monitor_of(name) is not None and time.monotonic() < deadline:
        time.sleep(0.02)


def _need_monitor(name: str, hint: str = "") -> Any:
    monitor = _monitor_of(name)
    if monitor is None:
        raise SessionError(f"no session {name!r} on this cluster{hint}")
    return monitor


_DRIVER_ID = secrets.token_hex(8)
