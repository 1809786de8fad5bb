"""What a sync of an adapter begins before the replicas have answered, and what becomes of it; no engine runs here."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlbench.engines.sync import Way, fixed, sync_weights
from rlbench.errors import StateError, Stopped
from rlbench.weights.manifest import AdapterInfo, Manifest
from rlbench.weights.transport import Choice
from tests.engines.test_sync_order import APPLY, FORWARD, LOGPROBS, PROOF, Answering, Link

pytestmark = pytest.mark.usefixtures("no_ray")
STAGE, BEGIN = "stage_weights", "begin_sync"
STAGED = Manifest("shm", (), adapter=AdapterInfo(1, 8, 16.0, ("q_proj",)))


@pytest.fixture
def told():
    return []


class Pair:
    """An engine of adapters and replicas that hold such, after a first sync; `values`: what calls give."""

    def __init__(self, told):
        self.values = {STAGE: STAGED, FORWARD: LOGPROBS, APPLY: [0.1], PROOF: [LOGPROBS], "commit_version": [{}]}
        self.train, self.infer = Answering("actor", told, self.values), Answering("inference", told, self.values)
        self.train.info["adapted"], self.infer.info["adapters"] = True, 2
        self.values[BEGIN] = [tuple(one for (one,) in self.infer.controls("status", "sync_facts"))]
        self.sync()
        told.clear()

    def sync(self, transport=None):
        return sync_weights(self.train, self.infer, fixed(7, 2), transport).result(timeout=120)


@pytest.fixture
def pair(told, monkeypatch):
    monkeypatch.setattr("rlbench.engines.sync.shm_prefix", lambda name: name)  # which starts a cluster
    monkeypatch.setattr(Link, "applying", lambda self, *events: lambda: None)
    return Pair(told)


def test_an_adapter_is_staged_and_computed_while_the_replicas_are_asked(pair, told):
    pair.train.controls = None  # the ranks are not asked where they are: they are the same
    assert pair.sync().gap == 0.0
    begun = [f"{STAGE} begins", f"{FORWARD} begins", f"{BEGIN} begins", f"{BEGIN} is waited for"]
    assert told[:5] == [*begun, f"{STAGE} is waited for"]
    assert told.count(f"{STAGE} begins") == told.count(f"{FORWARD} begins") == 1
    (manifest,) = pair.infer.asked[APPLY]
    assert (manifest.version, manifest.adapter.number) == (7, 2), "which was not known as it was staged"


def test_what_is_to_be_sent_is_asked_for_once_it_is_being_staged(pair, told):
    def asking():
        told.append("asked")
        return lambda: (7, 2)

    sync_weights(pair.train, pair.infer, asking).result(timeout=120)
    assert told[:3] == [f"{STAGE} begins", f"{FORWARD} begins", "asked"]
    told.clear()

    def refusing():
        raise StateError("the session is closed")

    with pytest.raises(StateError, match="closed"):
        sync_weights(pair.train, pair.infer, refusing).result(timeout=120)
    assert told[-3:] == [f"{STAGE} is stopped", f"{STAGE} is waited for", f"{FORWARD} is waited for"]


def begins_with_the_replicas(pair, told, **options):
    """Whether the replicas are asked first."""
    pair.sync(**options)
    return told[0] == f"{BEGIN} begins" and told.count(f"{STAGE} begins") == 1


def test_the_first_sync_other_ranks_whole_weights_and_another_transport_wait_for_the_answer(pair, told):
    pair.train.workers = [object()]
    assert begins_with_the_replicas(pair, told)
    told.clear()
    assert not begins_with_the_replicas(pair, told), "the way is known again"
    told.clear()
    pair.train.ways["inference"] = replace(pair.train.ways["inference"], choice=Choice("ipc"))
    assert begins_with_the_replicas(pair, told, transport="shm")
    told.clear()
    pair.infer.info["adapters"] = 0
    assert begins_with_the_replicas(pair, told)


def test_replicas_that_have_moved_get_what_is_staged_anew(pair, told):
    pair.train.ways["inference"] = Way(Choice("shm", (1,)), pair.train.ways["inference"].ranks, pair.train.workers)
    pair.sync()
    assert told.count(f"{STAGE} begins") == told.count(f"{FORWARD} begins") == 2
    again = len(told) - told[::-1].index(f"{STAGE} begins")
    assert told.index(f"{FORWARD} is waited for") < again, "what was begun is over first"
    assert pair.train.ways["inference"].choice == Choice("shm")
    told.clear()
    assert not begins_with_the_replicas(pair, told), "the new way is known, and where the ranks are"


def test_a_sync_waits_for_the_answer_while_another_is_not_over_or_has_failed(pair, told):
    def applying():
        assert begins_with_the_replicas(pair, told), "replicas still read what is staged"
        return [0.1]

    pair.values[APPLY] = lambda: (pair.values.update({APPLY: [0.1]}), told.clear(), applying())[2]
    pair.sync()
    told.clear()
    pair.values[PROOF] = StateError("torn")
    with pytest.raises(StateError, match="torn"):
        pair.sync()
    pair.values[PROOF] = [LOGPROBS]
    told.clear()
    assert begins_with_the_replicas(pair, told)


def test_what_was_begun_is_seen_to_its_end_where_the_replicas_refuse(pair, told):
    pair.values[BEGIN] = StateError("the weights of inference are offloaded")
    pair.values[STAGE] = Stopped("weight sync stopped while weights were gathered")
    with pytest.raises(StateError, match="offloaded"):
        pair.sync()
    assert told[-3:] == [f"{STAGE} is stopped", f"{STAGE} is waited for", f"{FORWARD} is waited for"]
    assert f"{APPLY} begins" not in told


def test_what_a_gpu_holds_staged_is_freed_where_the_replicas_refuse(pair, told):
    pair.train.ways["inference"] = replace(pair.train.ways["inference"], choice=Choice("ipc"))
    pair.values[BEGIN] = StateError("offloaded")
    with pytest.raises(StateError, match="offloaded"):
        pair.sync()
    assert told[-2:] == ["release_weights begins", "release_weights is waited for"]


def test_a_stop_while_the_replicas_are_asked_stops_the_staging(pair, told):
    started = Future()

    def asked():
        started.result(timeout=120).stop()
        raise Stopped("weight sync stopped")

    pair.values[BEGIN] = asked
    chain = sync_weights(pair.train, pair.infer, fixed(7, 2))
    started.set_result(chain)
    with pytest.raises(Stopped):
        chain.result(timeout=120)
    assert f"{STAGE} is stopped" in told and told[-1] == f"{FORWARD} is waited for"


def test_a_way_is_that_of_the_same_ranks():
    ranks = [object()]
    way = Way(Choice("shm"), [], ranks)
    for workers, transport, is_open in ((ranks, None, True), (ranks, "shm", True), (ranks, "ipc", False)):
        assert way.is_open(SimpleNamespace(workers=list(workers)), transport) is is_open
    assert not way.is_open(SimpleNamespace(workers=[object()]), None)
