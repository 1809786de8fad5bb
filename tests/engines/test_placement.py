"""Devices: which GPUs a replica sees, and that they are given back when an engine ends, whichever way it ends."""

import os
import sys
from types import SimpleNamespace

import pytest

import rlbench as rb
from rlbench.dispatch.link import Link
from rlbench.engines import placement
from rlbench.engines.placement import Device, visible_gpus
from rlbench.errors import BuildError
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.train.config import TrainConfig
from tests.clock import until
from tests.engines.modules import Regressor


class FakeRemote:
    """Stands for a Ray task that asks which GPUs the bundle it runs in has: GPU 4 + its number."""

    def __init__(self, function):
        self.device = None

    def options(self, device):
        made = FakeRemote(None)
        made.device = device
        return made

    def remote(self):
        return [4 + self.device.bundle]


@pytest.fixture
def on_gpus(monkeypatch):
    # not the real ray: imported before the cluster of the other tests starts, it would not know that one's token
    fake = SimpleNamespace(remote=FakeRemote, get=lambda refs, timeout: list(refs))
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(placement, "actor_options", lambda device: {"device": device})

    def with_gpus(count):
        monkeypatch.setattr(placement.cluster, "current", lambda: SimpleNamespace(gpus=count))

    return with_gpus


def test_a_tensor_parallel_replica_sees_the_gpus_of_all_its_devices_in_order(on_gpus):
    on_gpus(8)
    devices = [Device("group", 3), Device("group", 0), Device("other", 1)]
    assert visible_gpus(devices) == {"CUDA_VISIBLE_DEVICES": "7,4,5"}


def test_on_one_device_ray_itself_shows_the_gpu_and_without_gpus_there_is_nothing_to_show(on_gpus):
    on_gpus(8)
    assert visible_gpus([Device("group", 3)]) == {}
    on_gpus(0)
    assert visible_gpus([Device("group", 0), Device("group", 1)]) == {}


@pytest.mark.parametrize(
    ("config", "options", "nearest"),
    [
        (ReplicaConfig, {"path": "p", "dtyp": "float32"}, "dtype"),
        (TrainConfig, {"reshard_after_forwards": False}, "reshard_after_forward"),
    ],
)
def test_an_option_nobody_reads_is_refused_with_the_nearest_that_is_read(config, options, nearest):
    with pytest.raises(BuildError, match=nearest):
        config(**options)
    assert ReplicaConfig(path="p", dtype="float32").dtype == "float32"


def on_meta():
    with rb.device("meta"):
        return Regressor()


def broken_module():
    raise RuntimeError("this module cannot be made")


@pytest.fixture(scope="module")
def link(cluster):
    made = Link.create("giving-back")
    yield made
    made.close()


def reserved(link):
    """Device reservations of the session that Ray has not taken back."""
    import ray

    table = ray.util.placement_group_table().values()
    return [g["name"] for g in table if f"/{link.name}/devices/" in g["name"] and g["state"] != "REMOVED"]


def assert_given_back(link):
    until(lambda: reserved(link) == [], what=lambda: f"left: {reserved(link)}")
    assert link.state()["engines"] == {}


@pytest.mark.engine
def test_a_closed_engine_gives_its_devices_and_its_name_back(link):
    import ray

    for _ in range(2):  # all devices of the cluster each time, under the same name
        engine = rb.TrainEngine(on_meta, name="all", link=link)
        engine._allot(placement.Wish(ray_devices()))
        assert len(reserved(link)) == 1
        with pytest.raises(BuildError, match="an engine 'all' already"):
            engine._allot(placement.Wish(1))
        engine._actors = [ray.remote(Idle).remote()]
        engine.close()
        assert_given_back(link)


@pytest.mark.engine
def test_devices_that_another_engine_shares_stay_until_that_one_closes(link):
    import ray

    first, second = (rb.TrainEngine(on_meta, name=name, link=link) for name in ("first", "second"))
    devices = first._allot(placement.Wish(2))
    first._actors = [ray.remote(Idle).remote()]
    assert second._allot(placement.Wish(2, beside="first"), [first]) == devices
    second._actors = [ray.remote(Idle).remote()]
    first.close()
    assert list(link.state()["engines"]) == ["second"] and len(reserved(link)) == 1
    second.close()
    assert_given_back(link)


@pytest.mark.engine
def test_a_build_that_fails_leaves_no_process_no_record_and_no_device(link):
    engine = rb.TrainEngine(broken_module, name="broken", link=link)
    started = []
    spawn = engine._spawn

    def spawned(*args):
        spawn(*args)
        started.extend(link.state()["engines"]["broken"]["pids"].values())

    engine._spawn = spawned
    with pytest.raises(Exception, match="this module cannot be made"):
        engine.build(tensor_parallel_size=1, data_parallel_size=1)
    assert not engine.built
    assert_given_back(link)
    assert len(started) == 1
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started))


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["train", "inference"])
def test_an_unknown_option_is_refused_before_a_device_is_taken(link, tiny_path, kind):
    if kind == "train":
        engine = rb.TrainEngine(on_meta, name="typo", link=link, seeed=3)
    else:
        engine = rb.InferenceEngine(str(tiny_path), name="typo", link=link, seeed=3)
    with pytest.raises(BuildError, match="nearest: seed"):
        engine.build(tensor_parallel_size=1, data_parallel_size=1)
    assert_given_back(link)


class Idle:
    """A worker that only has to be ended."""

    def call(self, *args):
        return None


def ray_devices():
    from rlbench.runtime import cluster

    return cluster.current().devices
