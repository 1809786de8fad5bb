"""The monitor: one detached actor per session that owns what must outlive the kernel; widgets and panel read it.

It imports no torch, restarts by itself and finds its state in its journal. A driver is granted an epoch when it takes
the session; a control verb raises it for its operator, and the driver has it raised once more (`renew`) at its next
call. An epoch older than the driver's grant is another notebook's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from rlbench.dispatch.protocol import actor_name
from rlbench.errors import SessionError
from rlbench.monitor import holdings, lease, operators
from rlbench.monitor import state as states
from rlbench.monitor.commands import Commands, Refusal
from rlbench.monitor.endpoint import Endpoint, Routes
from rlbench.monitor.report import session_report
from rlbench.monitor.running import ProgressPoll, Running, RunningCall
from rlbench.monitor.telemetry import Telemetry
from rlbench.runtime import processes, registry

SAMPLE_INTERVAL_S = 0.5
CONTROL_LIMIT_S = 5.0
WATCHED_S = 5.0
"""How long after a look at the session its workers are asked for their memory and their calls' progress."""
LINGER_S = 1.0
"""How long after a control verb ended the session it still says what came of it."""


class Monitor:
    """State of session `name` on cluster `cluster_id`; `shm_prefix` starts the names of its shared-memory files."""

    def __init__(self, name: str, cluster_id: str, shm_prefix: str) -> None:
        self._name, self._cluster, self._shm_prefix = name, cluster_id, shm_prefix
        self._journal = states.Journal(registry.journal_file(name))
        self._state = self._journal.replay(states.initial(name))
        # an event whose answer was lost with a monitor's death is sent again by Ray
        self._applied = self._journal.once
        self._lock = threading.RLock()
        self._last_beat = self._last_call = self._last_alive = time.monotonic()
        self._running, self._progress, self._looked = Running(), ProgressPoll(), -WATCHED_S
        self._operator_epoch: int | None = None
        self._closed = False
        self._last_error: dict[str, Any] | None = None
        self._telemetry = Telemetry()
        self._dead: set[str] = set()
        self._commands = Commands(self._control, self._operate, self._busy)
        self._token = secrets.token_urlsafe(32)
        self._endpoint = Endpoint(Routes(self.report, self.telemetry, self._commands), self._token)
        self._describe_on_disk()
        threading.Thread(target=self._keep, daemon=True).start()

    def state(self, *keys: str) -> states.State:
        """Return the state, or the parts named; what is not journalled, such as the running calls, is a part too."""
        with self._lock:
            beside: dict[str, Callable[[], Any]] = {
                "history": lambda: states.history(self._state),
                "running": lambda: {call_id: call.what for call_id, call in self._running.calls.items()},
                "driver_age_s": lambda: time.monotonic() - self._last_beat,
                "idle_s": lambda: time.monotonic() - self._last_call,
                "lease_s": lambda: lease.lease_of(self._state["driver"]),
                "pid": os.getpid,
            }
            chosen = keys or (*(key for key in self._state if key != "records"), *beside)
            return {key: beside[key]() if key in beside else self._state[key] for key in chosen}

    def steps(self, known: int) -> tuple[int | None, list[dict[str, Any]]]:
        """Return the number of the step record at which the session stands, and those from number `known` on."""
        with self._lock:
            return self._state["tip"], self._state["records"][known:]

    def report(self, records: int) -> dict[str, Any]:
        """Return what the endpoint says of the session, with its last `records` step records."""
        with self._lock:
            self._looked = now = time.monotonic()
            driver = self._state["driver"]
            return session_report(
                self._state,
                self._running,
                self._progress,
                self._telemetry,
                records,
                alive=driver is not None and _alive(driver),
                beat_age_s=now - self._last_beat,
                silent_s=self._silent_s(),
                last_error=self._last_error,
            )

    def apply(self, epoch: int, *events: states.Event) -> None:
        """Journal and apply events of the driver of `epoch`, or of its operator; refuses an older driver."""
        with self._lock:
            self._need_present(epoch)
            for event in events:
                if event.get("id_once") not in self._applied:
                    self._apply(event)
            self._last_beat = self._last_call = time.monotonic()

    def next_rollout(self, epoch: int) -> int:
        """Count one more rollout; returns its number. Seeds derive from it, so no two may get the same."""
        with self._lock:
            number = int(self._state["rollouts"]) + 1
            self.apply(epoch, {"do": "set", "key": "rollouts", "value": number})
            return number

    def tell(self, epoch: int, *events: states.Event) -> None:
        """`apply` for who does not wait: what an older driver still tells is not heard, and nothing is raised."""
        with self._lock:
            if epoch >= self._granted() and not self._closed:
                self.apply(epoch, *events)

    def drive(self, driver: dict[str, Any], take_over: bool) -> int:
        """Grant the driver's lease and return its epoch; refuse while another driver lives, but for `take_over`."""
        with self._lock:
            present = self._state["driver"]
            if present is not None and present["id"] != driver["id"] and not take_over and _alive(present):
                raise SessionError(
                    f"session {self._name!r} is driven by pid {present['pid']} ({present['mode']}); "
                    "rb.attach(name, take_over=True) takes it over"
                )
            epoch = int(self._state["epoch"]) + 1
            self._apply({"do": "drive", "epoch": epoch, "driver": driver | {"epoch": epoch}})
            self._running.forget_verbs()
            self._last_beat = self._last_call = time.monotonic()
            self._announce(epoch)
        return epoch

    def renew(self, epoch: int) -> int | None:
        """Return a new epoch for the present driver, whose own ended as a control verb ran; None while one runs."""
        with self._lock:
            self._need_present(epoch)
            return None if self._operator_epoch is not None else self._raise_epoch()

    def beat(self, epoch: int) -> bool:
        """Note that the driver lives; False tells it that it no longer drives."""
        with self._lock:
            if epoch < self._granted():
                return False
            self._last_beat = time.monotonic()
            return True

    def begin(self, call_id: str, what: str, engine: str, epoch: int, verb_id: str = "") -> None:
        """Note a call that was submitted to `engine`; stop it where its verb was asked to stop."""
        with self._lock:
            self._running.begin(call_id, RunningCall(what, engine, epoch))
            self._last_beat = self._last_call = time.monotonic()
            late = verb_id in self._running.stopped_verbs
        if late:
            self._stop_call(call_id, engine)

    def end(self, call_id: str, epoch: int, error: dict[str, str] | None = None) -> None:
        """Note that the call is over on its first worker; `error`: how it failed there."""
        with self._lock:
            call = self._running.end(call_id, epoch, error)
            if error is not None:
                self._last_error = {"what": call.what if call else None, "time": time.time(), **error}
            self._last_beat = self._last_call = time.monotonic()

    def begin_verb(self, verb_id: str, what: str, epoch: int) -> None:
        """Note a verb of several calls: between them the session is not free either."""
        with self._lock:
            self._running.begin_verb(verb_id, RunningCall(what, "", epoch))
            self._last_beat = self._last_call = time.monotonic()

    def end_verb(self, verb_id: str) -> None:
        """Note that the verb is over."""
        with self._lock:
            self._running.end_verb(verb_id)

    def stop_running(self) -> list[str]:
        """Stop every running call and those that running verbs will still make; return what was running."""
        with self._lock:
            running, verbs = dict(self._running.calls), list(self._running.verbs.values())
            self._running.stopped_verbs.update(self._running.verbs)
        for call_id, call in running.items():
            self._stop_call(call_id, call.engine)
        return [call.what for call in running.values() or verbs]

    def _stop_call(self, call_id: str, engine: str) -> None:
        for actor in self._actors(engine):
            actor.stop.remote(call_id)

    def pause(self, paused: bool) -> None:
        """Hold generation on every replica after its current step, or let it go on."""
        with self._lock:
            self._apply({"do": "set", "key": "paused", "value": paused})
            inference = [n for n, record in self._state["engines"].items() if record.get("kind") == "inference"]
        replicas = [actor for name in inference for actor in self._actors(name)]
        told = [actor.control.remote("pause" if paused else "resume") for actor in replicas]
        if told:
            ray.wait(told, num_returns=len(told), timeout=CONTROL_LIMIT_S)

    def samples(self, since: float = 0.0, last: int | None = None) -> list[dict[str, Any]]:
        """Return the memory samples newer than `since` (Unix seconds), the `last` of them where not all are wanted; see
        docs/monitor-api.md."""
        found = self._telemetry.since(since)
        return found if last is None else found[max(0, len(found) - last) :]

    def telemetry(self, since: float) -> dict[str, Any]:
        """Return memory `samples`, and the `marks` of what ended after `since` (Unix seconds) or still runs."""
        with self._lock:
            self._looked = time.monotonic()
            return {"samples": self.samples(since), "marks": self._running.marks.since(since)}

    def close(self, epoch: int | None = None, linger_s: float = 0.1) -> bool:
        """End the session: workers, devices, files, staged weights, this process; False where a later driver drives."""
        if epoch is not None and epoch < self._granted():
            return False
        with self._lock:
            if self._closed:
                return True
            self._closed = True  # workers that are now seen dead must not bring the session's file back
            for actor in self._actors():
                ray.kill(actor)
            for placement in holdings.placements(self._state):
                holdings.remove_placement(placement)
            processes.sweep(Path("/dev/shm"), self._shm_prefix)
            shutil.rmtree(registry.snapshot_folder(self._name), ignore_errors=True)
            registry.session_file(self._name).unlink(missing_ok=True)
            self._journal.remove()
        threading.Timer(linger_s, _end, [actor_name(self._name, "monitor")]).start()
        return True

    # -- control verbs without the kernel

    def _control(self, verb: str, args: dict[str, Any]) -> Any:
        """Run a verb that needs no epoch."""
        if verb == "stop":
            return {"stopped": self.stop_running()}
        if verb == "close":
            return {"closed": self.close()}
        self.pause(verb == "pause")
        return {"paused": verb == "pause"}

    def _operate(self, verb: str, args: dict[str, Any]) -> Any:
        """Run a verb in an operator, under an epoch of its own."""
        with self._lock:
            epoch = self._operator_epoch = self._raise_epoch()
        try:
            result = operators.run(self._name, self._cluster, epoch, verb, args)
            if verb == "park" and not self.close(epoch, LINGER_S):
                registry.forget_parked(self._name)
                raise SessionError("a kernel took the session up while it was parked: it runs on")
            return result
        except Exception as error:
            self._last_error = {"what": verb, "time": time.time(), "kind": type(error).__name__, "message": str(error)}
            raise
        finally:
            with self._lock:
                self._running.forget_verbs([epoch])
                self._operator_epoch = None
                self._last_beat = time.monotonic()

    def _busy(self) -> list[str]:
        """Return what runs now, in words; refuse a session that is not yet made."""
        with self._lock:
            if not self._state["config"]:
                raise Refusal(409, f"session {self._name!r} consists of engines alone, which its notebook drives")
            if any("info" not in e for e in self._state["engines"].values()):
                raise Refusal(409, f"the engines of session {self._name!r} are not built yet: wait for them")
            names = self._running.names()
        return names or operators.untracked(self._actors())

    def _granted(self) -> int:
        """Return the epoch from which on the present driver, and what is done in its place, is heard."""
        driver = self._state["driver"]
        return 0 if driver is None else int(driver["epoch"])

    def _need_present(self, epoch: int) -> None:
        if epoch < self._granted():
            raise SessionError(
                f"another notebook drives session {self._name!r} now; take over with "
                f"rb.attach({self._name!r}, take_over=True)"
            )

    def _raise_epoch(self) -> int:
        epoch = int(self._state["epoch"]) + 1
        self._apply({"do": "set", "key": "epoch", "value": epoch})
        self._announce(epoch)
        return epoch

    def _announce(self, epoch: int) -> None:
        """Have workers refuse what comes under an older epoch."""
        for actor in self._actors():
            actor.adopt.remote(epoch)
        self._describe_on_disk()

    def _apply(self, event: states.Event) -> None:
        """Journal an event that can be applied, then apply it; give back devices that no engine has any more."""
        if self._closed:
            raise SessionError(f"session {self._name!r} is closed")
        after = states.reduce(self._state, event)
        self._journal.append(event)
        self._applied.append(event.get("id_once", ""))
        before, self._state = self._state, after
        self._running.marks.note(event, before)
        for placement in holdings.placements(before) - holdings.placements(after):
            holdings.remove_placement(placement)
        if holdings.pids(before) != holdings.pids(after):
            self._describe_on_disk()  # a person may have to end these processes without us

    def _actors(self, engine: str | None = None) -> list[Any]:
        return holdings.actors(self._state, engine)

    # -- the watch

    def _keep(self) -> None:
        """Sample memory and watch the lease until the process ends."""
        while not self._closed:
            time.sleep(SAMPLE_INTERVAL_S)
            self._sample()
            self._look_at_calls()
            driver = self._state["driver"]
            alive = driver is not None and _alive(driver)
            if alive:
                self._last_alive = time.monotonic()
            else:  # a dead driver ends no verb any more; an operator does
                with self._lock:
                    verbs = {verb.epoch for verb in self._running.verbs.values()} - {self._operator_epoch}
                    self._running.forget_verbs(verbs)
            if not lease.is_over(driver, alive, self._silent_s(), bool(self._running.calls)):
                continue
            if not lease.parks(self._state):
                self.close()
            else:  # what a dead script runs is stopped first; where it cannot be parked it stays for another lease
                self.stop_running()
                with contextlib.suppress(Refusal):
                    self._commands.submit("park", {"drop_gradients": True})

    def _silent_s(self) -> float:
        """Return the seconds since the last call, or since the driver was last seen alive."""
        return time.monotonic() - max(self._last_beat, self._last_alive)

    def _sample(self) -> None:
        """Sample memory, and see which workers died: dead at two looks, as an engine that is closed kills its own."""
        pids = holdings.pids(self._state)
        sample, before = self._telemetry.take(pids, self._watched())
        kills = [s["oom_kills"] for s in (before, sample) if s is not None and s["oom_kills"] is not None]
        if len(kills) == 2 and kills[1] > kills[0]:
            with self._lock:
                self._running.marks.instant("oom", "the system killed a process for want of memory")
        dead = {name for name in pids if name not in sample["resident"] and not holdings.lives(name)}
        self._forget_dead_calls(dead)
        self._note_dead(dead & self._dead)
        self._dead = dead

    def _watched(self) -> bool:
        """Tell whether somebody looks at the session."""
        return time.monotonic() - self._looked < WATCHED_S

    def _look_at_calls(self) -> None:
        """Ask the running calls how far they are, while somebody looks at the session."""
        if self._watched():
            with self._lock:
                calls = dict(self._running.calls)
            self._progress.look({call_id: self._actors(call.engine) for call_id, call in calls.items()})

    def _forget_dead_calls(self, dead: set[str]) -> None:
        """End the calls of which no worker is left to say that they are over."""
        with self._lock:
            for call_id, call in list(self._running.calls.items()):
                workers = self._state["engines"].get(call.engine, {}).get("pids", {})
                if dead.issuperset(workers):
                    self.end(call_id, call.epoch)

    def _note_dead(self, dead: set[str]) -> None:
        """Mark the engines of workers that died, outside a call too, as broken."""
        with self._lock:
            for name, record in () if self._closed else self._state["engines"].items():
                lost = [actor for actor in record.get("actors", []) if actor in dead]
                if lost and "info" in record and not record.get("broken"):
                    label = f"{'replica' if record['kind'] == 'inference' else 'rank'} {lost[0].rpartition('/')[2]}"
                    self._apply({"do": "engine", "name": name, "fields": {"broken": f"{label} died"}})

    def _describe_on_disk(self) -> None:
        """Write what others need to reach the session, and to end it where this process cannot."""
        record = holdings.session_record(self._name, self._cluster, self._shm_prefix, self._state)
        reached = {"url": self._endpoint.url, "token": self._token}
        registry.write_json(registry.session_file(self._name), record | reached)


def _alive(driver: dict[str, Any]) -> bool:
    return processes.is_same(driver["pid"], driver["started"])


def _end(name: str) -> None:
    ray.kill(ray.get_actor(name))
