"""Two engines' calls in flight at once: whichever fails first, the others are told, and the cause is what is raised."""

import threading
from types import SimpleNamespace

import pytest

from rlbench.engines.sync import Crossing
from rlbench.errors import Stopped, WeightSyncError, WorkerDied
from rlbench.weights.manifest import ChannelInfo, Manifest
from rlbench.weights.transport import PeerFailed

ENDS_S = 120.0


class Call:
    """A call that fails or succeeds at once (`outcome`), or waits until it is told to give up (None)."""

    def __init__(self, outcome, told):
        self.outcome, self.told, self.stopped = outcome, told, False

    def stop(self):
        self.stopped = True

    def result(self):
        if self.outcome is None:
            assert self.told.wait(ENDS_S), "nobody told this side to give up"
            raise PeerFailed("given up elsewhere")
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def crossing(sending, *applying):
    """A crossing of one rank and a replica for each of `applying`; with what it told and whom it called."""
    told, said, sent = threading.Event(), [], []

    def give_up(name, to, reason):
        said.append((name, to, reason))
        told.set()

    def apply_each(manifests):
        sent.extend(manifest.channel.first_rank for manifest in manifests)
        return [Call(outcome, told) for outcome in applying]

    train = SimpleNamespace(
        workers=[SimpleNamespace(control=SimpleNamespace(remote=give_up))],
        call_all=lambda *args, **options: Call(sending, told),
    )
    infer = SimpleNamespace(name="inference", apply_each=apply_each)
    manifest = Manifest("broadcast", (), ChannelInfo("token", "here", 1, 6, "gloo"))
    return Crossing(train, infer, manifest, [2, 3][: len(applying)]), said, sent


def test_each_replicas_workers_have_ranks_of_their_own_after_the_sender():
    made, said, sent = crossing([24, 0], "applied", "applied")
    assert made.result() == 24, "bytes, of all ranks"
    assert sent == [1, 3] and said == []


def test_a_replica_that_dies_releases_the_sender_and_the_other_replica_and_is_named():
    made, said, _ = crossing(None, None, WorkerDied("replica 1 died"))
    with pytest.raises(WeightSyncError, match=r"(?s)replica 1 died.*inference\.reload\(\)") as error:
        made.result()
    assert isinstance(error.value.__cause__, WorkerDied)
    assert said == [("give_up_sync", "inference", "replica 1 died")]


def test_a_sender_that_fails_releases_the_replicas():
    made, said, _ = crossing(ValueError("the hook has had enough"), None, None)
    with pytest.raises(WeightSyncError, match="the hook has had enough"):
        made.result()
    assert len(said) == 1


def test_the_cause_is_raised_and_not_its_echo_whichever_comes_first():
    made, _, _ = crossing(PeerFailed("given up elsewhere"), WeightSyncError("no room for bucket 3"), None)
    with pytest.raises(WeightSyncError, match="no room for bucket 3"):
        made.result()


def test_a_stop_reaches_the_sender_alone_and_is_raised_as_it_is():
    made, _, _ = crossing(Stopped("stopped before it was sent"), None)
    made.stop()
    assert made._sending.stopped and not any(call.stopped for call in made._applying)
    with pytest.raises(Stopped, match="before it was sent"):
        made.result()
