"""How a broadcast ends when something fails, dies or is stopped: both sides end, with one error, and the next works."""

import os
import signal

import pytest

from rlbench.engines.sync import sync_weights
from rlbench.errors import RemoteError, StateError, Stopped, WeightSyncError, WorkerDied
from tests.clock import until
from tests.engines.broadcasting import ENDS_S, build_ranks, build_replicas, sabotage, states, tokens
from tests.engines.syncing import gap, perturb
from tests.workers.tiny_checkpoint import make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.long]  # each failure rebuilds engines


@pytest.fixture(scope="module")
def folder(cluster, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("trouble"), tied=True)


@pytest.fixture(scope="module")
def infer(folder):
    engine = build_replicas(folder, 2, "trouble")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ranks(folder, infer):
    engine = build_ranks(folder, 2, "trouble-train")
    yield engine
    engine.close()


@pytest.fixture
def train(ranks):
    """The ranks, with some weights of their own, and nothing left of an earlier test's sabotage."""
    ranks.run(perturb)
    yield ranks
    ranks.run(sabotage)


def broadcast(train, infer):
    return sync_weights(train, infer, transport="broadcast")


def parameters(train):
    return train.run(sabotage)[0]


def assert_torn_and_mended(train, infer):
    assert set(states(infer)) == {"torn"}
    with pytest.raises(StateError, match="half-way"):
        infer.generate(["sort 12"], max_tokens=2)
    train.run(sabotage)
    assert train.p2p_weight_sync(infer, transport="broadcast")["gap"] <= 1e-4
    assert infer.generate(["sort 12"], max_tokens=2).samples == 1


@pytest.mark.parametrize("on_rank", [0, 1])
def test_a_hook_that_fails_in_the_middle_ends_both_sides_with_its_error(train, infer, on_rank):
    train.run(sabotage, fail=parameters(train) + 4, on_rank=on_rank)
    with pytest.raises(WeightSyncError, match=r"(?s)KeyError: 'the hook has had enough'.*rank.*sync again"):
        broadcast(train, infer).result(timeout=ENDS_S)
    assert_torn_and_mended(train, infer)


def test_a_hook_that_fails_while_announcing_touches_nothing(train, infer):
    train.run(sabotage, fail=4)
    with pytest.raises(RemoteError, match="the hook has had enough"):
        broadcast(train, infer).result(timeout=ENDS_S)
    assert infer.generate(["sort 12"], max_tokens=2).samples == 1


def test_names_that_do_not_fit_are_refused_before_anything_is_sent(train, infer):
    before = infer.weight_versions()
    train.run(lambda: setattr(type(module), "postprocess_output_named_parameters", wrong_names))
    with pytest.raises(WeightSyncError, match="did not send"):
        broadcast(train, infer).result(timeout=ENDS_S)
    assert infer.weight_versions() == before
    assert infer.generate(["sort 12"], max_tokens=2).samples == 1


def wrong_names(self, name, param, full_state_dict):
    return (name, param.full_tensor()) if "norm" not in name else None


def test_a_stop_before_anything_is_sent_leaves_the_replicas_as_they_are(train, infer, tmp_path):
    gate = tmp_path / "announcing"
    train.run(sabotage, wait=(3, str(gate)))
    before = infer.weight_versions()
    chain = broadcast(train, infer)
    until(gate.exists)
    chain.stop()
    gate.unlink()
    with pytest.raises(Stopped):
        chain.result(timeout=ENDS_S)
    assert states(infer) == ["cuda", "cuda"] and infer.weight_versions() == before
    assert infer.generate(["sort 12"], max_tokens=2).samples == 1


def test_a_stop_once_it_is_sent_comes_too_late_and_all_of_it_arrives(train, infer, tmp_path):
    gate = tmp_path / "sending"
    train.run(sabotage, wait=(parameters(train) + 4, str(gate)))
    chain = broadcast(train, infer)
    until(lambda: gate.exists() and states(infer) == ["torn", "torn"])
    chain.stop()
    gate.unlink()
    assert chain.result(timeout=ENDS_S)["gap"] <= 1e-4
    assert gap(train, infer) <= 1e-4 and len(set(infer.weight_versions())) == 1


def test_a_trainer_that_dies_while_it_sends_is_named_and_another_one_mends_the_replicas(train, infer, folder, tmp_path):
    gate = tmp_path / "sending"
    doomed = build_ranks(folder, 1, "doomed")
    doomed.run(sabotage, wait=(parameters(doomed) + 4, str(gate)))
    chain = broadcast(doomed, infer)
    until(lambda: gate.exists() and states(infer) == ["torn", "torn"])
    os.kill(pid_of(doomed, 0), signal.SIGKILL)
    with pytest.raises(WeightSyncError, match=r"rank 0 of doomed died") as error:
        chain.result(timeout=ENDS_S)
    assert isinstance(error.value.__cause__, WorkerDied)
    doomed.close()
    assert_torn_and_mended(train, infer)


def test_a_replica_that_dies_while_it_loads_is_named_and_the_rebuilt_engine_gets_a_group_of_its_own(
    train, infer, folder, tmp_path
):
    gate = tmp_path / "sending"
    train.p2p_weight_sync(infer, transport="broadcast")
    old = tokens(infer)
    train.run(sabotage, wait=(parameters(train) + 4, str(gate)))
    chain = broadcast(train, infer)
    until(lambda: gate.exists() and states(infer) == ["torn", "torn"])
    os.kill(pid_of(infer, 1), signal.SIGKILL)
    gate.unlink()
    with pytest.raises(WeightSyncError, match=r"replica 1 of trouble died") as error:
        chain.result(timeout=ENDS_S)
    assert isinstance(error.value.__cause__, WorkerDied)
    with pytest.raises(WeightSyncError, match=r"(?s)replica 1 of trouble died.*trouble\.close\(\)"):
        train.p2p_weight_sync(infer)
    infer.close()
    infer.build(data_parallel_size=1)
    train.run(sabotage)
    assert train.p2p_weight_sync(infer, transport="broadcast")["gap"] <= 1e-4
    assert tokens(infer)[0] not in (None, *old)


def pid_of(engine, worker):
    record = engine.link.state()["engines"][engine.name]
    return record["pids"][record["actors"][worker]]
