"""A monitor's real endpoint and session file, with a script behind it instead of engines: for views and their tests."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from pathlib import Path
from typing import Any

from rlbench.monitor.commands import Commands
from rlbench.monitor.endpoint import Endpoint, Routes
from rlbench.monitor.view import view_of
from rlbench.runtime import processes, registry

GIB, MIB = 1 << 30, 1 << 20


class Script:
    """A session whose state is what a test sets: `state`, `memory` and `marks` are served as they are.

    Control verbs are written down in `done` and act on `state` as a monitor's would: pause, offload, onload, stop.
    """

    def __init__(self, name: str, file: Path | None = None, **state: Any) -> None:
        """`file`: the session's file, where others look for it in a state folder of their own."""
        self.name, self.file = name, file or registry.session_file(name)
        self.state: dict[str, Any] = blank(name) | state
        self.memory: list[dict[str, Any]] = []
        self.marks: list[dict[str, Any]] = []
        self.done: list[tuple[str, dict[str, Any]]] = []
        self.slow_s = 0.0
        self._endpoint: Endpoint | None = None
        self.start()

    def start(self) -> None:
        """Serve, under a new address and token, and write the session's file."""
        commands = Commands(self._run, self._run, lambda: [call["what"] for call in self.state["running"]])
        token = os.urandom(8).hex()
        self._endpoint = Endpoint(Routes(self._report, self._samples, commands), token)
        registry.write_json(
            self.file,
            {
                "name": self.name,
                "cluster": "none",
                "node": "none",
                "epoch": 1,
                "pid": os.getpid(),
                "started": processes.start_time(os.getpid()),
                "boot": processes.boot_id(),
                "url": self._endpoint.url,
                "token": token,
                "shm": "none",
                "workers": {},
            },
        )

    def stop(self) -> None:
        """Do not answer any more; the file stays, as where a monitor died."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def close(self) -> None:
        """The session is over."""
        self.stop()
        self.file.unlink(missing_ok=True)

    def _report(self, records: int) -> dict[str, Any]:
        history = self.state["history"]
        report = self.state | {"history": history[-records:] if records else [], "history_total": len(history)}
        return report | {"view": view_of(report, time.time())}

    def _samples(self, since: float) -> dict[str, Any]:
        return {
            "samples": [sample for sample in self.memory if sample["time"] > since],
            "marks": [m for m in self.marks if m["seconds"] is None or m["time"] + m["seconds"] > since],
        }

    def _run(self, verb: str, args: dict[str, Any]) -> Any:
        time.sleep(self.slow_s)
        self.done.append((verb, args))
        if verb in ("pause", "resume"):
            self.state["paused"] = verb == "pause"
            return {"paused": verb == "pause"}
        if verb in ("offload", "onload"):
            engine = next(e for e in self.state["engines"] if e["name"] == args["engine"])
            for part in args["parts"]:
                away = "meta" if part == "kv_cache" else "cpu"
                engine["state"] = engine["state"] | {part: away if verb == "offload" else "cuda"}
            return dict(engine["state"])
        if verb == "stop":
            stopped, self.state["running"] = self.state["running"], []
            return {"stopped": [call["what"] for call in stopped]}
        return {}


def blank(name: str) -> dict[str, Any]:
    """A session with three engines in which nothing was done yet."""
    return {
        "name": name,
        "model": "tiny",
        "seed": 0,
        "epoch": 1,
        "step": 0,
        "version": 0,
        "rollouts": 0,
        "branch": "main",
        "paused": False,
        "running": [],
        "verbs": [],
        "snapshots": [],
        "history": [],
        "last_error": None,
        "driver": {"pid": os.getpid(), "mode": "notebook", "alive": True, "age_s": 0.1},
        "lease": {"seconds": 28800.0, "idle_s": 3.0, "left_s": None},
        "lengths": [],
        "splits": [],
        "engines": [
            engine("actor", "train", name, 2),
            engine("reference", "train", name, 1, optimizer=None),
            engine("inference", "inference", name, 1),
        ],
    }


def engine(role: str, kind: str, session: str, workers: int, **state: Any) -> dict[str, Any]:
    """One engine of the report; `state` replaces parts, None removes one."""
    own = {"weights": "cuda", "optimizer": "cuda"}
    if kind == "inference":
        own = {"weights": "cuda", "kv_cache": "cuda", "version": 0, "pending": False}
    return {
        "name": role,
        "kind": kind,
        "executor": "vllm" if kind == "inference" else "fsdp2",
        "ready": True,
        "state": {key: value for key, value in (own | state).items() if value is not None},
        "broken": None,
        "bytes": {"weights": 400 * MIB},
        "frees": {"weights": 400 * MIB, "optimizer": 1229 * MIB, "kv_cache": GIB},
        "workers": [
            {"name": f"rlbench/{session}/{role}/{i}", "pid": 4000 + i, "resident": 900 * MIB} for i in range(workers)
        ],
    }


def played(name: str, file: Path | None = None, steps: int = 42, seed: int = 0) -> Script:
    """A session in the middle of its work: memory, marks, lengths and metrics of `steps` steps, a rollout running."""
    chance = random.Random(seed)
    script = Script(name, file)
    now = time.time()
    script.memory = [_sample(script, now - 180 + i / 2, math.sin(i / 4.6)) for i in range(360)]
    at = now - 180
    while at < now - 8:
        for what, label, seconds in (
            ("rollout", "rollout", 4.0),
            ("score", "score", 0.4),
            ("train", "train_step", 3.0),
            ("sync", "weight sync", 0.6),
        ):
            script.marks.append({"time": at, "seconds": seconds, "what": what, "label": label, "engine": ""})
            at += seconds + 0.1
    script.marks += [
        {
            "time": now - 70,
            "seconds": 0.0,
            "what": "oom",
            "label": "inference 0 was killed",
            "engine": "inference",
        },
        {"time": now - 4, "seconds": None, "what": "rollout", "label": "rollout 43", "engine": "inference"},
    ]
    script.state |= {
        "step": steps,
        "version": steps,
        "rollouts": steps + 1,
        "history": [_record(i + 1, steps, chance) for i in range(steps)],
        "lengths": [lengths(i + 1, chance) for i in range(max(0, steps - 8), steps)],
        "splits": [
            {
                "step": steps,
                "seconds": 1.9,
                "rollout": 0.9,
                "score": 0.02,
                "train": 0.78,
                "sync": 0.1,
                "other": 0.02,
                "idle": 0.08,
                "tokens_per_s": 3104.0,
            }
        ],
        "running": [
            {
                "id": "a",
                "what": "rollout 43",
                "engine": "inference",
                "since": now - 4,
                "progress": [{"tokens": 5120, "finished": 28, "total": 64, "running": 36}],
            }
        ],
    }
    script.state["engines"][-1]["state"]["version"] = steps - 1
    return script


def lengths(number: int, chance: random.Random) -> dict[str, Any]:
    """A histogram of 64 log-normal lengths up to 512 tokens."""
    values = sorted(min(512, int(chance.lognormvariate(4.4 + number / 100, 0.7))) for _ in range(64))
    edges = [i * 16 for i in range(33)]
    counts = [sum(low <= v < high or (v == high == 512) for v in values) for low, high in itertools.pairwise(edges)]
    return {
        "rollout": number,
        "version": number,
        "step": number,
        "samples": 64,
        "aborted": 0,
        "truncated": sum(v == 512 for v in values) / 64,
        "p50": values[32],
        "p90": values[57],
        "p99": values[63],
        "max": values[-1],
        "edges": edges,
        "counts": counts,
    }


def _sample(script: Script, at: float, wave: float) -> dict[str, Any]:
    swing = 1 + 0.5 * wave
    owners, resident = {}, {}
    for one in script.state["engines"]:
        for worker in one["workers"]:
            mine = {
                "weights": 400,
                "gradients": 0,
                "optimizer": 0,
                "kv_cache": 0,
                "activations": 0,
                "other": 260,
            }
            if one["kind"] == "inference":
                mine |= {"kv_cache": 1024, "activations": int(40 * swing)}
            elif one["name"] == "actor":
                mine |= {
                    "optimizer": 800,
                    "gradients": int(200 * (swing > 1)),
                    "activations": int(330 * swing),
                }
            owners[worker["name"]] = {key: value * MIB for key, value in mine.items()}
            resident[worker["name"]] = sum(mine.values()) * MIB
    shared = dict.fromkeys(resident, 180 * MIB)
    return {"time": at, "resident": resident, "shared": shared, "owners": owners, "gpus": [], "oom_kills": 0}


def _record(step: int, steps: int, chance: random.Random) -> dict[str, Any]:
    done = step / max(1, steps)
    return {
        "step": step,
        "version": step,
        "loss_name": "grpo",
        "reward": 0.15 + 0.6 * done + chance.uniform(-0.06, 0.06),
        "kl": 0.002 + 0.01 * done + chance.uniform(0, 0.002),
        "entropy": 2.4 - 1.5 * done + chance.uniform(-0.1, 0.1),
        "clip_fraction": 0.02 + chance.uniform(0, 0.03),
        "grad_norm": 0.6 + chance.uniform(0, 0.5),
        "length": 118.0,
    }


def crowded(name: str, file: Path | None = None) -> Script:
    """`played` with all that takes room: long names, two ranks each, versions behind, what was killed, what failed."""
    script = played(name, file)
    long = "an-engine-of-a-name-that-nobody-wanted-to-shorten"
    behind = engine(long, "inference", name, 2, version=3, weights="cpu", kv_cache="meta")
    script.state["engines"] = [
        engine("actor", "train", name, 2, optimizer="cpu"),
        engine("reference", "train", name, 2, optimizer=None),
        engine("inference", "inference", name, 2, version=1),
        behind,
        engine("judge", "inference", name, 1) | {"broken": f"{name}/judge/0 was killed for want of memory (OOM)"},
        engine("critic", "train", name, 2) | {"ready": False},
    ]
    now = time.time()
    script.memory = [_sample(script, now - 180 + i / 2, math.sin(i / 4.6)) for i in range(360)]
    script.state |= {
        "model": "an-organisation/a-model-of-a-long-name-0.5B-Instruct",
        "branch": "a-branch-that-was-taken-later",
        "last_error": {
            "time": now,
            "what": "train_step",
            "kind": "LossError",
            "message": f"`{long}` gave per-token shape (64,), wanted that of inputs.logprobs: (64, 128)",
        },
    }
    return script
