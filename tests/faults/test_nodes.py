"""A session over several nodes that share neither loopback nor memory: it builds, steps, syncs with proof and keeps its
state in a folder that all see; a node that is cut off or killed is named, and what is left goes on.

The two tests of lost nodes are one story, the second goes on where the first ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import nodes
from tests.clock import until
from tests.runtime.kernels import Kernel, Refused

REFUSED = nodes.refused()
pytestmark = [pytest.mark.engine, pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))]
JOIN = """
import time, numpy as np, ray
import rlbench as rb
from rlbench.runtime import cluster
from rlbench.tiny import tasks
rb.init(address={address!r})
def joined(count):
    deadline = time.monotonic() + 120
    while len(cluster.node_devices()) != count:
        assert time.monotonic() < deadline, cluster.node_devices()
        time.sleep(0.2)
joined(2)
"""
WIDE = """
session = rb.Session(
    "tiny", name="wide", train={"lr": 1e-3, "shards": 2, "nodes": "spread"}, seed=3, undo=1,
    inference={"data_parallel_size": 2, "nodes": "spread"},
)
out = [session.train.nodes, session.inference.nodes, rb.resources()["nodes"]]
"""
TRAIN = """
rollouts = session.rollout(tasks.prompts(8, seed=3), n=4, max_tokens=12, progress=False)
batch = rollouts.score(tasks.reward).batch(advantage=rb.rl.group_normalized())
session.train_step(batch)
synced = session.sync_weights()
sums = lambda: session.train.call_all("training_checksums").result()
held = session.inference.weight_versions() == [session.version] * 2
out = [synced.transport, synced.gap <= synced.allowed, held, session.step]
"""
STATE = """
kept, before = session.snapshot("kept"), sums()
session.train_step(batch)
changed = sums() != before
session.restore("kept")
out = [changed, sums() == before, kept.disk, len(session.save({folder!r}).path) > 0]
"""
TELL = """
import threading
from tests.clock import until
from tests.session.looking import generates
threading.Thread(target=lambda: until(lambda: generates(session)) and open({file!r}, "w").close()).start()
"""
PLACES = """
from rlbench.dispatch.link import Link
from rlbench.engines.placement import Wish, addresses, place
from rlbench.errors import BuildError
link = Link.create("places")
def where(*args, **wish):
    return addresses(place(link, Wish(*args, **wish)))
out = [where(2, nodes=(far,)), where(4, 2, nodes=("spread",)), where(2, 2)]
try:
    where(1, nodes=("10.0.0.1",))
except BuildError as error:
    out.append(str(error))
link.close()
"""


@pytest.fixture(scope="module")
def cluster_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nodes.Nodes]:
    with nodes.nodes([2, 2], tmp_path_factory.mktemp("nodes")) as made:
        yield made


@pytest.fixture(scope="module")
def driver(cluster_of_two: nodes.Nodes, tiny_path: Path) -> Iterator[Kernel]:
    made = cluster_of_two.driver()
    try:
        made.run(JOIN.format(address=cluster_of_two.address))
        yield made
        made.run("'session' in globals() and session.close()")
    finally:
        made.end()


@pytest.fixture(scope="module")
def wide(cluster_of_two: nodes.Nodes, driver: Kernel) -> list[Any]:
    """Where the workers of a session over both nodes are; one step is taken, and one sync made."""
    seats: list[Any] = driver.run(WIDE)
    return [*seats, driver.run(TRAIN)]


@pytest.mark.curve
def test_devices_are_where_they_are_asked_for_and_a_replicas_are_on_one_node(
    cluster_of_two: nodes.Nodes, driver: Kernel
) -> None:
    near, far = cluster_of_two.addresses
    driver.run(f"far = {far!r}")
    named, pairs, pair, refused = driver.run(PLACES)
    assert (named, pairs) == ([far, far], [near, near, far, far])
    assert len(set(pair)) == 1 and f"{near}, {far}" in refused


@pytest.mark.curve
def test_ranks_and_replicas_on_two_nodes_train_sync_and_keep_their_state(
    cluster_of_two: nodes.Nodes, driver: Kernel, wide: list[Any], tmp_path: Path
) -> None:
    both = cluster_of_two.addresses
    ranks, replicas, seats, trained = wide
    assert ranks == replicas == both
    assert [sorted(seats[node]["workers"]) for node in both] == [
        [f"wide: rank {i} of actor", f"wide: replica {i} of inference"] for i in range(2)
    ]
    assert trained == ["broadcast", True, True, 1]
    assert driver.run(STATE.format(folder=str(tmp_path / "saved"))) == [True, True, True, True]


@pytest.mark.long
def test_a_node_that_is_cut_off_is_named_and_what_is_left_goes_on(
    cluster_of_two: nodes.Nodes, driver: Kernel, wide: list[Any]
) -> None:
    driver.run("session.train_step(batch); before = sums()")
    driver.send("session.train_step(batch)")
    cluster_of_two.cut_off(1)
    with pytest.raises(Refused, match=r"WorkerDied: rank 1 of actor died .*its node left the cluster"):
        driver.answer()
    said, is_back = driver.run("joined(1); out = [repr(session.heal()), sums() == before]")
    assert "from snapshot 'after step 2'" in said and is_back
    assert driver.run("out = session.train.nodes + session.inference.nodes") == [cluster_of_two.addresses[0]] * 4
    assert driver.run(TRAIN)[1:] == [True, True, 3]


@pytest.mark.long
def test_a_node_that_joins_is_taken_and_one_that_is_killed_is_named(
    cluster_of_two: nodes.Nodes, driver: Kernel, tmp_path: Path
) -> None:
    cluster_of_two.add(2)
    third = cluster_of_two.addresses[2]
    driver.run("joined(2); session.resize(train=3, inference=1); session.resize(inference=2)")
    ranks, replicas = driver.run("out = [session.train.nodes, session.inference.nodes]")
    assert len(ranks) == 3 and set(ranks) == set(replicas) == {cluster_of_two.addresses[0], third}
    generating = tmp_path / "generating"
    driver.run(TELL.format(file=str(generating)))
    driver.send("session.rollout(tasks.prompts(64), n=16, max_tokens=1500, ignore_eos=True, progress=False)")
    until(generating.exists)
    cluster_of_two.kill(2)
    with pytest.raises(Refused, match=r"WorkerDied: replica 1 of inference died .*its node left the cluster"):
        driver.answer()
    with pytest.raises(Refused, match=r"BuildError: train wants 3 devices, and there are 2: session.resize\(train=…\)"):
        driver.run("joined(1); session.heal()")
    driver.run("session.resize(train=2)")
    assert driver.run(TRAIN)[1:] == [True, True, 4]
