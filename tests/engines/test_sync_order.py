"""In which order a weight sync asks ranks and replicas, and what it waits for; no engine runs here."""

from concurrent.futures import Future

import numpy as np
import pytest

from rlbench.engines.sync import fixed, sync_weights
from rlbench.errors import StateError, WeightSyncError
from rlbench.weights.manifest import Manifest
from rlbench.weights.probe import probe_tokens
from tests.engines.test_sync_refusals import Engine

pytestmark = pytest.mark.usefixtures("no_ray")
FORWARD, APPLY, PROOF = "policy_forward", "apply_weights", "prompt_logprobs"
LOGPROBS = [np.zeros(len(row) - 1, np.float32) for row in probe_tokens(10)]


class Call:
    """A call that is under way; `told` is what happened to all, in order."""

    def __init__(self, name, told, value):
        self.name, self._told, self._value = name, told, value
        told.append(f"{name} begins")

    def stop(self):
        self._told.append(f"{self.name} is stopped")

    def result(self):
        self._told.append(f"{self.name} is waited for")
        if isinstance(self._value, Exception):
            raise self._value
        return self._value() if callable(self._value) else self._value


class Link:
    name = "test"

    def __init__(self, told):
        self._told = told

    def held(self, what, steps):
        return steps

    def applying(self, *events):
        for event in events:
            fields = event["fields"]
            if "proof" in fields:
                self._told.append(f"{event['name']} owes {'a proof' if fields['proof'] else 'nothing'}")
            else:
                self._told.append(f"{event['name']} has staged v{fields['staged_version']}")
        return lambda: self._told.append("that is on record")

    def apply(self, *events):
        self.applying(*events)()


class Answering(Engine):
    """One whose calls give `values`, by verb."""

    def __init__(self, name, told, values):
        super().__init__(name)
        self.link, self._told, self._values, self.asked = Link(told), told, values, {}

    def call_all(self, verb, *args, **options):
        self.asked[verb] = args
        return Call(verb, self._told, self._values.get(verb))

    def call_logprobs(self, *args):
        return self.call_all(FORWARD)

    def staged_fields(self, version, manifest):
        return {"staged_version": version}


@pytest.fixture
def told():
    return []


@pytest.fixture
def sync(told, monkeypatch):
    monkeypatch.setattr("rlbench.engines.sync.shm_prefix", lambda name: name)  # which starts a cluster

    def start(forward=LOGPROBS, applying=(0.25,), proving=(LOGPROBS,), kv_cache="cuda"):
        train = Answering("actor", told, {"stage_weights": Manifest("shm", ()), FORWARD: forward})
        answers = {APPLY: applying, PROOF: proving, "commit_version": [{}]}
        infer = Answering("inference", told, answers)
        infer._status["kv_cache"] = kv_cache
        answers["begin_sync"] = [tuple(one for (one,) in infer.controls("status", "sync_facts"))]
        return sync_weights(train, infer, fixed(7))

    return start


def test_what_is_to_be_proven_is_computed_while_the_replicas_apply(sync, told):
    done = sync().result(timeout=120)
    assert done.version == 7 and done.gap == 0.0 and done.seconds >= 0.25
    begin = told.index("stage_weights is waited for") + 1
    assert told[begin : begin + 7] == [
        f"{APPLY} begins",
        f"{PROOF} begins",
        f"{FORWARD} begins",
        f"{FORWARD} is waited for",
        "inference owes a proof",
        f"{APPLY} is waited for",
        f"{PROOF} is waited for",
    ]
    assert told[-3:] == ["inference owes nothing", "actor has staged v7", "that is on record"]


def test_a_stop_meanwhile_cuts_no_proof_and_reaches_what_follows(sync, told):
    started = Future()

    def forward():
        started.result(timeout=120).stop()
        return LOGPROBS

    chain = sync(forward)
    started.set_result(chain)
    assert chain.result(timeout=120).gap == 0.0
    assert f"{FORWARD} is stopped" not in told and f"{APPLY} is stopped" in told
    assert told.index("inference owes a proof") < told.index(f"{APPLY} is stopped")


def test_ranks_that_fail_meanwhile_are_told_of_once_the_replicas_have_applied(sync, told):
    with pytest.raises(ArithmeticError, match="overflow"):
        sync(ArithmeticError("overflow")).result(timeout=120)
    assert told[-2:] == [f"{APPLY} is waited for", f"{PROOF} is waited for"] and "inference owes a proof" not in told


def test_replicas_that_could_not_apply_are_told_of_whatever_becomes_of_their_proof(sync, told):
    with pytest.raises(WeightSyncError, match="half-way"):
        sync(applying=WeightSyncError("half-way"), proving=StateError("torn")).result(timeout=120)
    assert told[-1] == f"{PROOF} is waited for" and "inference owes nothing" not in told


def test_the_proof_waits_for_a_kv_cache_that_is_released(sync, told):
    assert sync(kv_cache="meta").result(timeout=120).gap is None
    assert f"{PROOF} begins" not in told and told[-3:-1] == ["inference owes a proof", "actor has staged v7"]
