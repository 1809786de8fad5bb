"""What a weight sync refuses before it asks anybody for weights; no engine runs here."""

from types import SimpleNamespace

import pytest

from rlbench.engines.sync import sync_weights
from rlbench.errors import StateError, WeightSyncError
from rlbench.weights.transport import Facts

pytestmark = pytest.mark.usefixtures("no_ray")


class Engine:
    """An engine that only tells about itself; any other call is a mistake."""

    link = SimpleNamespace(held=lambda what, steps: steps)

    def __init__(self, name, dtype="float32", weights="cuda", **facts):
        self.name, self.info = name, {"dtype": dtype, "vocab_size": 10}
        self._status = {"weights": weights, "torn": None, "kv_cache": "cuda", "version": 3, "holds": ""}
        self._facts = Facts("here", "127.0.0.1", **facts)
        self.workers, self.ways = [object()], {}

    def status(self):
        return self._status

    def controls(self, *names):
        return [[{"status": self._status, "sync_facts": self._facts}[name]] for name in names]

    def call_all(self, verb, **options):
        assert verb == "begin_sync"
        return SimpleNamespace(result=lambda: [(self._status, self._facts)], stop=lambda: None)


def refused(train, infer, error, said, transport=None):
    with pytest.raises(error, match=said):
        sync_weights(train, infer, transport=transport).result(timeout=120)


def test_another_dtype_since_log_probs_could_not_be_compared():
    said = r"trainer computes in bfloat16 and the replica in float32.*dtype='bfloat16'"
    refused(Engine("actor", "bfloat16"), Engine("inference", "float32"), StateError, said)


def test_weights_that_are_not_resident():
    refused(Engine("actor", weights="cpu"), Engine("inference"), StateError, r"actor\.cuda\('weights'\)")


def test_a_transport_that_cannot_work_here():
    refused(Engine("actor"), Engine("inference"), WeightSyncError, "there are shm, ipc, broadcast", "nvlink")
    refused(Engine("actor"), Engine("inference"), WeightSyncError, "on GPUs", "ipc")
