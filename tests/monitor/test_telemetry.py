"""Memory by owner: asked for while somebody looks, never waited for, and adding up to what the process holds."""

import contextlib
import time

import pytest

from rlbench.dispatch.link import Link, spawn_host
from rlbench.errors import Stopped
from rlbench.monitor import client
from rlbench.monitor.telemetry import Telemetry, owners_of
from tests.clock import LIMIT_S, until
from tests.echo_engine import submit

MIB = 1 << 20


# -- whose it is


def test_on_a_host_the_owners_add_up_to_the_resident_memory():
    told = {"device": "host", "weights": 5 * MIB, "gradients": 2 * MIB, "optimizer": 0, "activations": 0, "other": 1}
    owners = owners_of(told, 100 * MIB)
    assert sum(owners.values()) == 100 * MIB and owners["other"] == 93 * MIB
    assert set(owners) == {"weights", "gradients", "optimizer", "activations", "other"}


def test_what_was_freed_since_a_worker_answered_makes_nothing_negative():
    assert owners_of({"device": "host", "weights": 5 * MIB}, 3 * MIB)["other"] == 0


def test_where_host_memory_is_not_where_things_lie_the_worker_says_what_the_rest_is():
    gpu = {"device": "gpu", "weights": 5, "kv_cache": 7, "activations": 1, "other": 2, "allocated": 13, "reserved": 15}
    assert owners_of(gpu, 100 * MIB) == {"weights": 5, "kv_cache": 7, "activations": 1, "other": 2}
    assert owners_of({"device": "host", "processes": 2, "weights": 5, "other": 9}, 7) == {"weights": 5, "other": 9}
    assert owners_of({"device": "gpu", "processes": 2, "weights": 5}, 7) == {"weights": 5}


def test_only_so_many_samples_are_kept():
    telemetry = Telemetry()
    for _ in range(1300):
        telemetry._samples.append({"time": 1.0, "resident": {}})
    assert len(telemetry.since(0.0)) == 1200


# -- asked of real workers


@pytest.fixture
def told(cluster, request):
    """A session with one worker that does not answer before it is let; its link and the worker."""
    import ray

    link = Link.create(f"telemetry-{abs(hash(request.node.name)) % 10**8}")
    host = spawn_host(link, "echo", 0, "tests.targets:TellingTarget", (0,), {}, {"num_cpus": 0})
    name = f"rlbench/{link.name}/echo/0"
    fields = {"kind": "train", "actors": [name], "pids": {name: ray.get(host.pid.remote())}, "info": {}}
    link.engine("echo", fields)
    yield link, host, name
    with contextlib.suppress(ray.exceptions.RayActorError):  # a test killed it
        ray.get(host.control.remote("let"))
    link.close()


@pytest.mark.engine
def test_nobody_is_asked_while_nobody_looks(told):
    import ray

    link, host, name = told
    begin = time.time()
    until(lambda: len([s for s in link.samples() if s["time"] > begin]) >= 3)  # a driver's own look at the samples
    assert ray.get(host.control.remote("asked")) == (0, 0)
    assert all(s["owners"] == {} and name in s["shared"] for s in link.samples(begin))


@pytest.mark.engine
def test_a_worker_that_is_slow_to_answer_is_asked_once_and_delays_nothing(told):
    import ray

    link, host, name = told
    record = client.find(link.name)
    begin = client.ask(record, "/samples")["time"]
    until(lambda: ray.get(host.control.remote("asked"))[0] == 1)
    assert submit(link, host, "shout", "its calls run").result(timeout=LIMIT_S) == "ITS CALLS RUN"
    until(lambda: len(client.ask(record, f"/samples?since={begin}")["samples"]) >= 4)
    assert ray.get(host.control.remote("asked")) == (1, 1), "asked again before it had answered"
    samples = client.ask(record, f"/samples?since={begin}")["samples"]
    assert all(s["owners"] == {} and s["resident"][name] > 0 for s in samples)
    ray.get(host.control.remote("let"))
    sample = until(lambda: next((s for s in client.ask(record, "/samples")["samples"] if s["owners"]), None))
    owners = sample["owners"][name]
    assert owners["weights"] == MIB and sum(owners.values()) == sample["resident"][name] > sample["shared"][name] > 0
    (engine,) = client.ask(record, "/state")["engines"]
    assert (engine["bytes"], engine["frees"]) == ({"weights": MIB, "gradients": 0}, {"weights": 0})
    client.ask(record, "/samples")
    until(lambda: ray.get(host.control.remote("asked"))[0] > 2)
    assert ray.get(host.control.remote("asked"))[1] == 1, "never two questions at a time"


@pytest.mark.engine
def test_a_worker_that_cannot_tell_is_left_out(cluster):
    import ray

    link = Link.create("telemetry-silent")
    host = spawn_host(link, "echo", 0, "tests.targets:EchoTarget", (0,), {}, {"num_cpus": 0})
    name = f"rlbench/{link.name}/echo/0"
    link.engine("echo", {"kind": "train", "actors": [name], "pids": {name: ray.get(host.pid.remote())}, "info": {}})
    record = client.find(link.name)
    begin = client.ask(record, "/samples")["time"]
    samples = until(lambda: len(s := client.ask(record, f"/samples?since={begin}")["samples"]) >= 3 and s)
    assert all(s["owners"] == {} and name in s["resident"] for s in samples)
    assert client.ask(record, "/state")["engines"][0]["bytes"] == {}
    link.close()


@pytest.mark.engine
def test_calls_and_deaths_are_marked(told):
    import os
    import signal

    import ray

    link, host, _ = told
    record = client.find(link.name)
    pid = ray.get(host.pid.remote())
    rollout = submit(link, host, "slowly", 600.0, what="rollout 8", track=True)
    (begun,) = until(lambda: client.ask(record, "/samples")["marks"])
    until(lambda: client.ask(record, "/samples")["time"] >= begun["time"] + 0.3)  # by the monitor's clock
    rollout.stop()
    with pytest.raises(Stopped):
        rollout.result()
    submit(link, host, "shout", "x", what="echo.cpu()", track=True).result()
    ended = until(
        lambda: (
            len(m := client.ask(record, "/samples")["marks"]) == 2 and all(x["seconds"] is not None for x in m) and m
        )
    )
    assert [(m["what"], m["label"], m["engine"]) for m in ended] == [
        ("rollout", "rollout 8", "echo"),
        ("offload", "echo.cpu()", "echo"),
    ]
    assert ended[0]["seconds"] >= 0.3 and ended[0]["time"] < ended[1]["time"]
    running = submit(link, host, "slowly", 60.0, what="train_step", track=True)
    until(lambda: client.ask(record, f"/samples?since={time.time()}")["marks"])
    assert [m["seconds"] for m in client.ask(record, f"/samples?since={time.time()}")["marks"]] == [None]
    os.kill(pid, signal.SIGKILL)
    marks = until(lambda: len(m := client.ask(record, "/samples")["marks"]) == 4 and m)
    assert {m["what"] for m in marks[2:]} == {"train", "died"} and all(m["seconds"] is not None for m in marks)
    assert next(m for m in marks if m["what"] == "died")["label"] == "rank 0 died"
    del running
    until(lambda: client.ask(record, "/state")["engines"][0]["broken"])
    assert len(client.ask(record, "/samples")["marks"]) == 4, "it died once"


@pytest.mark.engine
def test_lengths_survive_the_monitor_and_an_older_driver_adds_none(cluster):
    import os
    import signal

    link = Link.create("telemetry-lengths")
    link.apply(*({"do": "lengths", "entry": {"rollout": number}} for number in range(39)))
    link.tell({"do": "lengths", "entry": {"rollout": 39}})
    kept = until(lambda: (found := link.state("lengths")["lengths"]) and found[-1]["rollout"] == 39 and found)
    assert [e["rollout"] for e in kept] == list(range(8, 40)) and kept[0]["step"] == 0
    stale = link.epoch
    again = Link.attach(link.name, take_over=True)
    link.tell({"do": "lengths", "entry": {"rollout": 99}})
    assert again.epoch > stale
    os.kill(again.state()["pid"], signal.SIGKILL)
    assert again.state("lengths")["lengths"] == kept
    again.close()
