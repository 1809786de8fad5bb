"""Memory over time: what each worker's process holds, whose it is, what the devices say. Kept for ten minutes.

Workers are asked on their control lanes, and only while somebody looks; nobody waits for a worker that is slow to
answer, and none is asked twice at a time.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlbench.runtime import processes
from rlbench.runtime.devices import gpu_memory

KEPT = 1200
ANSWER_S = 0.05
"""How long a sample waits for answers: a worker that is not busy needs a tenth of that."""
OWNERS = ("weights", "gradients", "optimizer", "kv_cache", "activations")
PARTS = ("weights", "gradients", "optimizer", "kv_cache")
ALLOCATOR = ("allocated", "reserved")
NOBODY = -1
"""No process has this number."""

Sample = dict[str, Any]
Told = Mapping[str, Any]
"""What a worker's `memory()` says."""


class Telemetry:
    """The samples of a session's workers, and what the workers last said of themselves."""

    def __init__(self) -> None:
        self._samples: collections.deque[Sample] = collections.deque(maxlen=KEPT)
        self._questions = Questions()

    def take(self, pids: Mapping[str, int], ask: bool) -> tuple[Sample, Sample | None]:
        """Take a sample of these workers (pid by actor), asking them where `ask`; returns it and the one before."""
        if ask:
            self._questions.ask(pids)
        else:
            self._questions.forget()
        held = {name: now for name, pid in pids.items() if (now := processes.memory_bytes(pid)) is not None}
        told = {name: said for name in held if (said := self._questions.told(name, pids[name])) is not None}
        allocator = {name: found for name, said in told.items() if (found := _picked(said, ALLOCATOR))}
        sample: Sample = {
            "time": time.time(),
            "resident": {name: resident for name, (resident, _) in held.items()},
            "shared": {name: shared for name, (_, shared) in held.items()},
            "owners": {name: owners_of(said, held[name][0]) for name, said in told.items()},
            "oom_kills": processes.oom_kills(),
            **({"torch": allocator} if allocator else {}),
            **_gpus(),
        }
        before = self._samples[-1] if self._samples else None
        self._samples.append(sample)
        return sample, before

    def since(self, when: float) -> list[Sample]:
        """Samples newer than `when`, Unix seconds."""
        return [sample for sample in list(self._samples) if sample["time"] > when]

    def resident(self) -> Mapping[str, int]:
        """Resident bytes by actor, as last sampled."""
        return self._samples[-1]["resident"] if self._samples else {}

    def engine(self, pids: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """`bytes` an engine's parts take now and what offloading them `frees`, all workers; empty while unknown."""
        told = [said for name, pid in pids.items() if (said := self._questions.told(name, pid)) is not None]
        return {
            "bytes": _summed([_picked(said, PARTS) for said in told]),
            "frees": _summed([said.get("frees", {}) for said in told]),
        }


class Questions:
    """`memory()` asked of workers: one question in flight for each, answers taken as they come."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[int, Any]] = {}
        self._told: dict[str, tuple[int, Told]] = {}
        self._complained: set[tuple[str, int]] = set()

    def ask(self, pids: Mapping[str, int]) -> None:
        """Ask every worker that is not being asked already, then take the answers there are within `ANSWER_S`."""
        import ray

        for name in pids.keys() - self._asked.keys():
            with contextlib.suppress(ValueError):  # died, or not born yet
                self._asked[name] = pids[name], ray.get_actor(name).control.remote("memory")
        refs = [ref for _, ref in self._asked.values()]
        if not refs:
            return
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=ANSWER_S)
        for name, (pid, ref) in list(self._asked.items()):
            if ref in ready:
                del self._asked[name]
                self._hear(name, pid, ref)

    def told(self, name: str, pid: int) -> Told | None:
        """The latest answer of the worker of that name and process; None before it gave one."""
        known_pid, said = self._told.get(name, (NOBODY, {}))
        return said if said and known_pid == pid else None

    def forget(self) -> None:
        """Nobody looks: what is known grows old, and an old answer is not shown as a new one."""
        self._told = {}
        self._asked = {name: (NOBODY, ref) for name, (_, ref) in self._asked.items()}

    def _hear(self, name: str, pid: int, ref: Any) -> None:
        import ray

        try:
            self._told[name] = pid, dict(ray.get(ref))
        except ray.exceptions.RayActorError:  # it died: its engine shows that
            self._told.pop(name, None)
        except ray.exceptions.RayError as error:  # it cannot tell: say so once, in the monitor's log
            self._told.pop(name, None)
            if (name, pid) not in self._complained:
                self._complained.add((name, pid))
                print(f"{name} does not tell its memory: {error}", file=sys.stderr)


def owners_of(told: Told, resident: int) -> dict[str, int]:
    """Return the bytes of one worker by owner, of what it says of itself and the `resident` bytes of its process.

    On a host without a GPU "other" is what the owners leave of `resident`; elsewhere the worker says what the rest is.
    """
    owners = _picked(told, OWNERS)
    if told.get("device") == "host" and told.get("processes", 1) == 1:
        return owners | {"other": max(0, resident - sum(owners.values()))}
    return owners | _picked(told, ("other",))


def _picked(told: Told, names: Sequence[str]) -> dict[str, int]:
    return {name: int(told[name]) for name in names if told.get(name) is not None}


def _summed(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: collections.Counter[str] = collections.Counter()
    for part in parts:
        total.update(part)
    return dict(total)


def _gpus() -> dict[str, Any]:
    """NVML's view; a driver that fails says so in the sample, and the watch over the lease goes on."""
    try:
        return {"gpus": gpu_memory()}
    except Exception as error:
        return {"gpus": [], "gpus_error": f"{type(error).__name__}: {error}"}
