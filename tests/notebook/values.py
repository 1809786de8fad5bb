"""What the monitor says of a session and its engines, and values whose cards the tests look at."""

import time

from rlbench.session.state.snapshots import Snapshot
from tests.data.values import rollouts


def state(**engines):
    return {
        "name": "sort",
        "config": {"model": "tiny", "seed": 3},
        "step": 42,
        "version": 42,
        "running": {"id": "rollout 64"},
        "engines": engines,
        "driver": {"mode": "notebook"},
        "lease_s": 8 * 3600.0,
    }


ACTOR = {
    "kind": "train",
    "actors": ["a/0", "a/1"],
    "info": {},
    "state": {"weights": "cuda", "optimizer": "cpu", "version": 42},
}
INFERENCE = {
    "kind": "inference",
    "actors": ["i/0"],
    "info": {"executor": "vllm"},
    "state": {"weights": "cuda", "kv_cache": "meta", "version": 41},
}


def batch(rewards=(0, 1, 2, 3, 4, 5), advantage=lambda rewards, group: rewards):
    return rollouts().score(rewards).batch(advantage)


def snapshot(label="warm", **fields):
    kept = {
        "id": "1f",
        "label": label,
        "step": 2,
        "version": 3,
        "rollouts": 4,
        "bytes": 3 << 20,
        "fresh": 1 << 20,
        "disk": False,
        "folder": "/nowhere",
        "time": time.time() - 90,
    }
    return Snapshot(**(kept | fields))
