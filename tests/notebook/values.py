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


SAMPLE = {"resident": {"a/0": 2**30, "a/1": 2**29, "i/0": 2**28}, "owners": {"a/0": {"weights": 2**20, "other": 0}}}


class Held:
    """An engine as `engine_card` sees it: what its monitor knows, and no worker to ask."""

    name, built = "actor", True

    def __init__(self, records, error=None):
        self.link, self._records, self._error = self, records, error

    def state(self, *keys):
        if self._error:
            raise self._error
        return {"engines": self._records, "version": 42}

    def samples(self, last=None):
        return [SAMPLE]


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
