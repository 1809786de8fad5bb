"""A driver's end of a session: its lease and epoch, tickets in order, actors by name.

Everything above reaches the workers and the monitor through one `Link`, so there is one total order of calls.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import pickle
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlbench.dispatch.chain import Steps
from rlbench.dispatch.obituary import final_fate, obituary
from rlbench.dispatch.pending import Observer, Pending, sigint_held
from rlbench.dispatch.protocol import Ticket, actor_name
from rlbench.errors import EngineError, SessionError
from rlbench.runtime import cluster, processes, registry
from rlbench.sendable import is_refusal, why_not

MONITOR = "rlbench.monitor.actor:Monitor"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
BEAT_S = 5.0
Noting = Callable[[str, str, tuple[Any, ...], dict[str, Any]], contextlib.AbstractContextManager[Any]]
"""Keeps a record of what a user does with an engine itself: its name, the method, and the arguments."""


class Link:
    """Drives session `name`. Made by `Link.create`, `Link.attach`, or for one control verb by `Link.operate`.

    `drives`: it is the driver's own: the session's lease depends on its life, and it may end the session.
    `noting`: set by a session that keeps a record of its verbs.
    """

    def __init__(self, name: str, monitor: Any, epoch: int, drives: bool = True) -> None:
        self.name = name
        self.monitor = monitor
        self.epoch = epoch
        # of one epoch there may be several drivers, whose calls are told apart by their numbers
        self._seq = itertools.count(1 if drives else secrets.randbits(40) << 20)
        self.placing = threading.Lock()
        self._submitting = threading.Lock()  # all ranks see the calls of several threads in one order
        self._renewing = threading.Lock()
        self._acknowledged = ""
        self._closed = threading.Event()
        self._drives = drives
        self.noting: Noting = lambda engine, name, args, kwargs: contextlib.nullcontext()
        self._verb = threading.local()  # the one that this thread makes the calls of
        if drives:
            threading.Thread(target=self._beat, daemon=True).start()

    @classmethod
    def create(cls, name: str | None = None, lease_s: float | None = None) -> Link:
        """Start a session's monitor and drive it.

        `lease_s`: how long the session outlives its driver; None: as `rlbench.monitor.lease` says.
        Raises SessionError where the name is bad or taken.
        """
        joined = cluster.current()
        name = name or f"anonymous-{secrets.token_hex(3)}"
        if not NAME.fullmatch(name):
            raise SessionError(f"session name {name!r}: use letters, digits, '.', '_' and '-', at most 64")
        if _find(actor_name(name, "monitor")) is not None:
            raise SessionError(f"session {name!r} is there already: rb.attach({name!r}) drives it")
        registry.journal_file(name).unlink(missing_ok=True)
        shutil.rmtree(registry.snapshot_folder(name), ignore_errors=True)  # of one whose machine went down
        import ray

        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        monitor = (
            ray.remote(_load(MONITOR))
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
            return cls(name, monitor, _drive(monitor, False, lease_s))
        except BaseException:  # an interrupt: a monitor that nobody drives would keep the name
            ray.kill(monitor)
            registry.forget_session(name)
            raise

    @classmethod
    def attach(cls, name: str | None = None, take_over: bool = False) -> Link:
        """Drive a session that is there. Without a name: the only one. Raises SessionError saying which there are."""
        joined = cluster.current()
        known = [s["name"] for s in registry.live_sessions(joined.id)]
        if name is None:
            if len(known) != 1:
                raise SessionError(f"which session? there are {known or 'none'}: rb.attach(name)")
            name = known[0]
        monitor = _find(actor_name(name, "monitor"))
        if monitor is None:
            raise SessionError(f"no session {name!r} on this cluster; there are {known or 'none'}")
        return cls(name, monitor, _drive(monitor, take_over))

    @classmethod
    def operate(cls, name: str, epoch: int) -> Link:
        """Drive a session for one control verb, under the epoch its monitor gave out for that; its driver stays."""
        monitor = _find(actor_name(name, "monitor"))
        if monitor is None:
            raise SessionError(f"session {name!r} is gone: its monitor does not run any more")
        return cls(name, monitor, epoch, drives=False)

    @staticmethod
    def exists(name: str) -> bool:
        """Whether a session of this name runs on the cluster."""
        cluster.current()
        return _find(actor_name(name, "monitor")) is not None

    @staticmethod
    def look(name: str, *keys: str) -> dict[str, Any]:
        """Parts of the state of a session, without driving it. Raises SessionError where there is none."""
        import ray

        monitor = _find(actor_name(name, "monitor"))
        if monitor is None:
            raise SessionError(f"no session {name!r} on this cluster")
        return dict(ray.get(monitor.state.remote(*keys), timeout=30))

    @property
    def closed(self) -> bool:
        """True once `close()` was called here."""
        return self._closed.is_set()

    def state(self, *keys: str) -> dict[str, Any]:
        """The session's state, or the parts of it that are named, from its owner."""
        return dict(self._ask("state", *keys))

    def apply(self, *events: dict[str, Any]) -> None:
        """Change the session's state; each event counts once, also where a monitor that restarts is asked again."""
        self._ask("apply", self.epoch, *({"id_once": secrets.token_hex(8)} | event for event in events))

    def tell(self, event: dict[str, Any]) -> None:
        """Send an event that nothing depends on, without waiting; a driver that was replaced is not heard."""
        self.monitor.tell.remote(self.epoch, {"id_once": secrets.token_hex(8)} | event)

    def set(self, **values: Any) -> None:
        """Set top-level values of the session's state."""
        self.apply(*({"do": "set", "key": k, "value": v} for k, v in values.items()))

    def next_rollout(self) -> int:
        """Count one more rollout and return its number, which no other has, also from another thread."""
        return int(self._ask("next_rollout", self.epoch))

    def engine(self, name: str, fields: dict[str, Any] | None) -> None:
        """Set fields of an engine's record; None drops the engine."""
        self.apply({"do": "engine", "name": name, "fields": fields})

    def samples(self, since: float = 0.0) -> list[dict[str, Any]]:
        """Memory samples newer than `since`."""
        return list(self._ask("samples", since))

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
        """Send one call to all actors of an engine: `calls[i]` = (args, kwargs) of rank i.

        `queue_total` > 0 lets the first actor hand out that many shared work items. `track` shows the call at the
        monitor as running (one more message; for calls that may take long).
        """
        if self.closed:
            raise SessionError(f"session {self.name!r} is closed")
        call_id, sent = secrets.token_hex(6), 0
        verb_id = getattr(self._verb, "id", "")

        def send(ranks: Sequence[int]) -> list[Any]:
            nonlocal sent
            sent = self.epoch
            ticket = Ticket(
                sent,
                next(self._seq),
                call_id,
                len(actors),
                self._acknowledged,
                actor_name(self.name, engine, 0) if queue_total else "",
                queue_total,
                track,
            )
            if track:
                self.monitor.begin.remote(call_id, what or name, engine, sent, verb_id)
            return [
                actors[i].call.remote(ticket, name, tuple(calls[i][1]), *calls[i][0], *calls[i][1].values())
                for i in ranks
            ]

        def again(ranks: Sequence[int]) -> list[Any] | None:
            if not self._renew(sent):
                return None
            with self._submitting:
                return send(ranks)

        try:
            with sigint_held(), self._submitting:
                refs = send(range(len(actors)))
        except (TypeError, pickle.PicklingError) as error:  # Ray's, of an argument; nothing of the call went out
            if not is_refusal(error):
                raise
            raise EngineError(why_not(f"an argument of {what or name}", list(calls), error, "the workers")) from None
        except KeyboardInterrupt:  # it came while the call went out: nobody would hold it
            for actor in actors:
                actor.stop.remote(call_id)
            raise

        def ended() -> None:
            self._acknowledged = call_id

        def died(i: int, error: BaseException) -> BaseException:
            return self.died(engine, labels[i], actors[i], error)

        return Pending(
            what or f"{engine}.{name}", labels, actors, refs, call_id, finish, observer, died, ended, collective, again
        )

    @contextlib.contextmanager
    def verb(self, what: str) -> Iterator[None]:
        """Show `what` as running also between its calls, so that no control verb comes in between, and a stop that
        does reaches the next of them. All of it is on one thread."""
        verb_id, around = secrets.token_hex(6), getattr(self._verb, "id", "")
        self.monitor.begin_verb.remote(verb_id, what, self.epoch)
        self._verb.id = verb_id
        try:
            yield
        finally:
            self._verb.id = around
            self.monitor.end_verb.remote(verb_id)

    def held(self, what: str, steps: Steps) -> Steps:
        """The steps of one verb, shown as running from the first to the last."""
        with self.verb(what):
            return (yield from steps)

    def pause(self, paused: bool) -> None:
        """Hold all generation where it is, or let it go on."""
        self._ask("pause", paused)

    def stop_running(self) -> list[str]:
        """Set the stop flag of every call that runs, also one of an earlier driver; returns what they are."""
        return list(self._ask("stop_running"))

    def close(self) -> None:
        """End the session and everything in it; of a session that somebody else drives now, only let go.

        Safe to call twice.
        """
        if self.closed or not self._drives:
            self._closed.set()
            return
        import ray

        try:
            if not ray.get(self.monitor.close.remote(self.epoch), timeout=60):
                self._closed.set()
                return
        except ray.exceptions.RayActorError:
            pass  # it had gone already, and the workers end themselves when it is gone
        self._closed.set()
        deadline = time.monotonic() + 10.0
        while _find(actor_name(self.name, "monitor")) is not None and time.monotonic() < deadline:
            time.sleep(0.02)

    def release(self) -> None:
        """Stop driving; the session lives on."""
        self._closed.set()

    def died(self, engine: str, label: str, worker: Any, error: BaseException) -> BaseException:
        """What to raise for `error`, which Ray raised of a worker: a `WorkerDied`, unless it answers again."""
        fate = final_fate(worker, error)
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
        """Have an epoch later than `stale`; False while a control verb runs, after which one is to be had.

        Raises SessionError where another notebook took over.
        """
        with self._renewing:
            if self.epoch <= stale:
                granted = self._ask("renew", self.epoch)
                if granted is None:
                    return False
                self.epoch = int(granted)
            return True

    def _ask(self, name: str, *args: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self.monitor, name).remote(*args), timeout=30)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, SessionError) else error from None
        except ray.exceptions.RayActorError:
            raise SessionError(f"session {self.name!r} is gone: its monitor does not run any more") from None

    def _beat(self) -> None:
        """Tell the monitor that this driver lives, until the session is closed, gone, or driven by somebody else."""
        import ray

        while not self._closed.wait(BEAT_S):
            if not ray.is_initialized():
                return
            try:
                if not ray.get(self.monitor.beat.remote(self.epoch), timeout=60):
                    return
            except ray.exceptions.GetTimeoutError:
                continue  # a busy machine: the next beat tells
            except ray.exceptions.RayError:
                return  # the session or the cluster is gone: the next verb says so


def spawn_host(
    link: Link,
    engine: str,
    rank: int,
    target: str,
    args: tuple[Any, ...],
    env: dict[str, str],
    options: dict[str, Any],
) -> Any:
    """Start one worker actor of an engine, detached, with its two lanes. `options` are Ray's (placement)."""
    import ray

    name = actor_name(link.name, engine, rank)
    host = ray.remote(concurrency_groups={"compute": 1, "control": 4})(_load("rlbench.dispatch.host:Host"))
    return host.options(name=name, lifetime="detached", max_restarts=0, **options).remote(
        name, actor_name(link.name, "monitor"), env, target, args, cluster.current().id
    )


def shm_prefix(session: str) -> str:
    """Start of the names of a session's shared-memory files; no session's is the start of another's."""
    return f"{cluster.current().shm_prefix}{session}:"


def _drive(monitor: Any, take_over: bool, lease_s: float | None = None) -> int:
    import ray

    started = processes.start_time(os.getpid())
    driver = {"id": _DRIVER_ID, "pid": os.getpid(), "started": started, "mode": driver_mode()}
    if lease_s is None and "RLBENCH_LEASE_S" in os.environ:
        lease_s = float(os.environ["RLBENCH_LEASE_S"])
    driver |= {} if lease_s is None else {"lease_s": lease_s}
    try:
        return int(ray.get(monitor.drive.remote(driver, take_over), timeout=60))
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, SessionError) else error from None


def driver_mode() -> str:
    """`notebook` in an IPython kernel, else `script`: what decides how long a session outlives its driver."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return "notebook" if shell is not None and hasattr(shell, "kernel") else "script"


def _find(name: str) -> Any | None:
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


_DRIVER_ID = secrets.token_hex(8)
