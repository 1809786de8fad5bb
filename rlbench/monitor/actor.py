"""The monitor: one detached actor per session that owns what must outlive the kernel.

It holds config, engines, versions, step, history, the driver's lease and the latest memory samples; widgets and panel
read it. It imports no torch, restarts by itself and finds its state in its journal.
"""

from __future__ import annotations

import collections
import glob
import os
import threading
import time
from pathlib import Path
from typing import Any

import ray

from rlbench.dispatch.protocol import actor_name
from rlbench.errors import SessionError
from rlbench.monitor import lease
from rlbench.monitor import state as states
from rlbench.runtime import processes, registry
from rlbench.runtime.devices import gpu_memory

SAMPLE_INTERVAL_S = 0.5
SAMPLES_KEPT = 1200


class Monitor:
    """State of session `name` on cluster `cluster_id`; `shm_prefix` starts the names of its shared-memory files."""

    def __init__(self, name: str, cluster_id: str, shm_prefix: str) -> None:
        self._name, self._cluster, self._shm_prefix = name, cluster_id, shm_prefix
        self._journal = states.Journal(registry.journal_file(name))
        self._state = self._journal.replay(states.initial(name))
        self._lock = threading.RLock()
        self._last_beat = self._last_call = time.monotonic()
        self._running: dict[str, tuple[str, str]] = {}
        self._ended: collections.deque[str] = collections.deque(maxlen=64)
        self._samples: collections.deque[dict[str, Any]] = collections.deque(maxlen=SAMPLES_KEPT)
        self._describe_on_disk()
        threading.Thread(target=self._keep, daemon=True).start()

    def state(self) -> states.State:
        """The whole state, with what is not journalled: running calls, the age of the driver's last sign."""
        with self._lock:
            return self._state | {
                "running": {call: what for call, (what, _) in self._running.items()},
                "driver_age_s": time.monotonic() - self._last_beat, "idle_s": time.monotonic() - self._last_call,
                "lease_s": lease.lease_of(self._state["driver"]), "pid": os.getpid(),
            }  # fmt: skip

    def apply(self, epoch: int, *events: states.Event) -> None:
        """Journal and apply events of the driver of `epoch`; refuses an older driver."""
        with self._lock:
            if epoch < self._state["epoch"]:
                raise SessionError(f"another notebook drives session {self._name!r} now")
            for event in events:
                self._apply(event)
            self._last_beat = self._last_call = time.monotonic()

    def drive(self, driver: dict[str, Any], take_over: bool) -> int:
        """Grant the driver's lease; returns its epoch.

        Raises SessionError naming the present driver while that lives (`take_over=True` replaces it).
        """
        with self._lock:
            present = self._state["driver"]
            if present is not None and present["id"] != driver["id"] and not take_over and _alive(present):
                raise SessionError(
                    f"session {self._name!r} is driven by pid {present['pid']} ({present['mode']}); "
                    "rb.attach(name, take_over=True) takes it over"
                )
            epoch = int(self._state["epoch"]) + 1
            self._apply({"do": "drive", "epoch": epoch, "driver": driver})
            self._last_beat = self._last_call = time.monotonic()
            self._describe_on_disk()
        for actor in self._actors():
            actor.adopt.remote(epoch)
        return epoch

    def beat(self, epoch: int) -> bool:
        """The driver lives; False tells it that it no longer drives."""
        with self._lock:
            if epoch < self._state["epoch"]:
                return False
            self._last_beat = time.monotonic()
            return True

    def begin(self, call_id: str, what: str, engine: str) -> None:
        """A call was submitted to `engine`: a running call is not idle."""
        with self._lock:
            if call_id not in self._ended:  # a short call's end may overtake its begin
                self._running[call_id] = (what, engine)
            self._last_beat = self._last_call = time.monotonic()

    def end(self, call_id: str) -> None:
        """The call is over on its first worker."""
        with self._lock:
            self._ended.append(call_id)
            self._running.pop(call_id, None)
            self._last_beat = self._last_call = time.monotonic()

    def stop_running(self) -> list[str]:
        """Set the stop flag of every running call; returns what was running."""
        running = dict(self._running)
        for call_id, (_, engine) in running.items():
            for actor in self._actors(engine):
                actor.stop.remote(call_id)
        return [what for what, _ in running.values()]

    def samples(self, since: float = 0.0) -> list[dict[str, Any]]:
        """Memory samples newer than `since` (Unix seconds): resident bytes per actor, and NVML's view of each GPU."""
        return [s for s in self._samples if s["time"] > since]

    def close(self, epoch: int | None = None) -> bool:
        """End the session: its workers, its devices, its files, then this process.

        `epoch`: of the driver that asks; False, and nothing ends, where a later one drives. Staged weights are swept
        here, as a worker that was killed could not remove them.
        """
        if epoch is not None and epoch < self._state["epoch"]:
            return False
        for actor in self._actors():
            ray.kill(actor)
        for placement in _placements(self._state):
            _remove_placement(placement)
        for path in Path("/dev/shm").glob(glob.escape(self._shm_prefix) + "*"):
            path.unlink(missing_ok=True)
        registry.session_file(self._name).unlink(missing_ok=True)
        self._journal.remove()
        threading.Timer(0.1, lambda: ray.kill(ray.get_actor(actor_name(self._name, "monitor")))).start()
        return True

    def _apply(self, event: states.Event) -> None:
        """Journal an event that can be applied, then apply it; give back devices that no engine has any more."""
        after = states.reduce(self._state, event)
        self._journal.append(event)
        before, self._state = self._state, after
        for placement in _placements(before) - _placements(after):
            _remove_placement(placement)

    def _actors(self, engine: str | None = None) -> list[Any]:
        found = []
        records = self._state["engines"]
        for record in records.values() if engine is None else [records.get(engine, {})]:
            for name in record.get("actors", []):
                try:
                    found.append(ray.get_actor(name))
                except ValueError:
                    continue  # died, or not born yet: nothing to tell it
        return found

    def _keep(self) -> None:
        """Sample memory and watch the lease until the process ends."""
        while True:
            time.sleep(SAMPLE_INTERVAL_S)
            pids = {n: p for e in self._state["engines"].values() for n, p in e.get("pids", {}).items()}
            resident = {name: processes.resident_bytes(pid) for name, pid in pids.items()}
            self._samples.append(
                {
                    "time": time.time(),
                    "resident": {k: v for k, v in resident.items() if v is not None},
                    **_gpus(),
                }
            )
            self._forget_dead_calls({name for name, nbytes in resident.items() if nbytes is None})
            driver = self._state["driver"]
            notebook = (
                driver is not None and driver["mode"] == "notebook"
            )  # idle: no call, though its kernel lives
            idle_s = time.monotonic() - (self._last_call if notebook else self._last_beat)
            if lease.is_over(driver, driver is not None and _alive(driver), idle_s, bool(self._running)):
                self.close()
                return

    def _forget_dead_calls(self, dead: set[str]) -> None:
        """No worker is left to say that these calls are over."""
        with self._lock:
            for call_id, (_, engine) in list(self._running.items()):
                workers = self._state["engines"].get(engine, {}).get("pids", {})
                if dead.issuperset(workers):
                    self.end(call_id)

    def _describe_on_disk(self) -> None:
        registry.write_json(registry.session_file(self._name), {
            "name": self._name, "cluster": self._cluster, "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "epoch": self._state["epoch"],
        })  # fmt: skip


def _gpus() -> dict[str, Any]:
    """NVML's view; a driver that fails says so in the sample, and the watch over the lease goes on."""
    try:
        return {"gpus": gpu_memory()}
    except Exception as error:
        return {"gpus": [], "gpus_error": f"{type(error).__name__}: {error}"}


def _alive(driver: dict[str, Any]) -> bool:
    return processes.is_same(driver["pid"], driver["started"])


def _placements(state: states.State) -> set[str]:
    return {name for engine in state["engines"].values() for name in engine.get("placements", [])}


def _remove_placement(name: str) -> None:
    try:
        ray.util.remove_placement_group(ray.util.get_placement_group(name))
    except ValueError:
        return  # already gone
