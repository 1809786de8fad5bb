"""In which order a weight sync asks ranks and replicas, and what it waits for; no engine runs here."""

from concurrent.futures import Future

import numpy as np
import pytest

from rlbench.engines.sync import sync_weights
from rlbench.weights.manifest import Manifest
from rlbench.weights.probe import probe_tokens
from tests.engines.test_sync_refusals import Engine

pytestmark = pytest.mark.usefixtures("no_ray")
FORWARD, APPLY = "policy_forward", "apply_weights"
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

    def engine(self, name, fields):
        self._told.append(f"{name} owes a proof" if fields.get("proof") else f"{name} owes nothing")


class Answering(Engine):
    """One whose calls give `values`, by verb."""

    def __init__(self, name, told, values):
        super().__init__(name)
        self.link, self._told, self._values = Link(told), told, values

    def call_all(self, verb, *args, **options):
        return Call(verb, self._told, self._values.get(verb))

    def call_logprobs(self, *args):
        return self.call_all(FORWARD)

    def note_staged(self, version, manifest):
        self._told.append(f"v{version} is staged")


@pytest.fixture
def told():
    return []


@pytest.fixture
def sync(told, monkeypatch):
    monkeypatch.setattr("rlbench.engines.sync.shm_prefix", lambda name: name)  # which starts a cluster

    def start(forward=LOGPROBS):
        train = Answering("actor", told, {"stage_weights": Manifest("shm", ()), FORWARD: forward})
        answers = {APPLY: [0.25], "prompt_logprobs": [LOGPROBS], "commit_version": [{}]}
        return sync_weights(train, Answering("inference", told, answers), version=7)

    return start


def test_what_is_to_be_proven_is_computed_while_the_replicas_apply(sync, told):
    done = sync().result(timeout=120)
    assert done.version == 7 and done.gap == 0.0 and done.seconds >= 0.25
    meanwhile = [f"{APPLY} begins", f"{FORWARD} begins", f"{FORWARD} is waited for", "inference owes a proof"]
    begin = told.index("stage_weights is waited for") + 1
    assert told[begin : begin + 5] == [*meanwhile, f"{APPLY} is waited for"]
    assert told[begin + 5] == "prompt_logprobs begins" and told[-2:] == ["inference owes nothing", "v7 is staged"]


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
    assert told[-1] == f"{APPLY} is waited for" and "inference owes a proof" not in told
