"""One cluster of our own from start to end, as kernels meet it: found, shared, guarded, and ended without a trace.

Most tests use one cluster, in the order they stand here, since starting one takes seconds.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from rlbench.runtime import cluster as clusters
from rlbench.runtime import head, processes, registry
from tests.clock import until
from tests.runtime.kernels import Kernel, Refused

pytestmark = [pytest.mark.engine, pytest.mark.slow]

JOIN = "import rlbench as rb\nc = rb.init({})\nout = [c.id, c.address, c.devices, c.ours]"
WAITING = """
from rlbench.dispatch.link import Link, spawn_host
link = Link.create('waits', lease_s=600)
host = spawn_host(link, 'echo', 0, 'tests.targets:EchoTarget', (0,), {}, {'num_cpus': 0})
waiting = link.submit('echo', ['rank 0'], [host], 'slowly', [((600.0,), {})], list)
import ray
while ray.get(host.running.remote()) != 'slowly': pass
"""
LEAN = "import sys, types\nsys.modules['rlbench.workers.preload'] = types.ModuleType('preload')"
"""What Python runs when it starts, so that the warm processes of the clusters here import nothing, in no time."""
ALONE = "import ray\nray.init(address={!r}, log_to_driver=False)\nout = len(ray.nodes())"


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A state folder of this module's own, also for what this process reads of it."""
    folder = tmp_path_factory.mktemp("state")
    before = os.environ["XDG_STATE_HOME"]
    os.environ["XDG_STATE_HOME"] = str(folder)
    yield folder
    left = registry.read_cluster()
    if left is not None:
        clusters.stop_cluster(left)
    os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Where kernels that start clusters find modules: `LEAN` first."""
    folder = tmp_path_factory.mktemp("lean")
    (folder / "sitecustomize.py").write_text(LEAN)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def starter(state, paths, tmp_path_factory):
    """The kernel that starts the cluster; its temporary files lie too deep for a unix socket."""
    deep = tmp_path_factory.mktemp("x" * 80)
    kernel = Kernel(state, TMPDIR=str(deep), PYTHONPATH=paths)
    kernel.run(JOIN.format("devices=2"))
    yield kernel
    kernel.end()


@pytest.fixture(scope="module")
def guest(starter, state, paths):
    """A second kernel of the same user."""
    kernel = Kernel(state, PYTHONPATH=paths)
    yield kernel
    kernel.end()


def here():
    """The record of the cluster that is published now."""
    found = registry.read_cluster()
    assert found is not None
    return found


def is_gone(record):
    """Nothing of the cluster is left: processes, temporary folder, shared memory, record."""
    return (
        not clusters.guard_alive(record)
        and not processes.session_members(record.ray_session)
        and not Path(record.temp_dir).exists()
        and not list(Path("/dev/shm").glob(f"rlb-{record.id}-*"))
        and registry.read_cluster() != record
    )


def leave_shared_memory(record):
    """A file as a killed training rank would leave it."""
    path = Path(f"/dev/shm/rlb-{record.id}-left:actor-0")
    path.write_bytes(b"weights")
    return path


def test_init_again_is_the_cluster_that_is_there(starter):
    before = here()
    assert starter.run("out = [rb.init() is c, rb.init(devices=2) is c, repr(c)]") == [
        True,
        True,
        f"Cluster({before.address}, 2 CPU device slots)",
    ]
    assert here() == before


def test_what_it_writes_is_its_owners_alone(starter, state):
    folder = Path(here().temp_dir)
    assert folder.parent == Path("/tmp") and oct(folder.stat().st_mode & 0o777) == "0o700"
    assert {oct(p.stat().st_mode & 0o777) for p in [state / "rlbench", state / "rlbench" / "sessions"]} == {"0o700"}
    files = [p for p in (state / "rlbench").rglob("*") if p.is_file()]
    assert {p.name for p in files} >= {"cluster.json", "token", "lock", "guard.log"}
    assert {oct(p.stat().st_mode & 0o777) for p in files} == {"0o600"}


def test_another_number_of_devices_is_refused_naming_the_mend(starter):
    with pytest.raises(Refused, match=r"ClusterError: .*2 devices.*rb.shutdown\(\).*devices=3"):
        starter.run("rb.init(devices=3)")


def test_another_address_is_refused_while_joined(starter):
    with pytest.raises(Refused, match=r"ClusterError: .*rb.shutdown\(\).*10.0.0.1:6379"):
        starter.run("rb.init(address='10.0.0.1:6379')")


def test_resources_say_what_there_is(starter):
    names = ("devices", "nodes", "ours", "total", "warm_bytes")
    found = starter.run(f"found = rb.resources()\nout = {{k: found[k] for k in {names}}}")
    assert (found["devices"], list(found["nodes"]), found["ours"]) == (2, ["127.0.0.1"], True) and found["total"][
        "CPU"
    ] == 2.0
    assert found["warm_bytes"] > 10 << 20


def test_a_second_kernel_joins_the_same_cluster(guest):
    record = here()
    assert guest.run(JOIN.format("")) == [record.id, record.address, 2, True]


def test_ray_initialised_by_somebody_else_is_refused_naming_the_mend(guest):
    guest.run("import ray\nray.shutdown()\nimport rlbench.runtime.cluster as own\nown._joined = None")
    guest.run(ALONE.format(here().address))
    with pytest.raises(Refused, match=r"ClusterError: Ray is already initialised.*ray.shutdown\(\)"):
        guest.run("rb.init()")
    assert guest.run("ray.shutdown()\nout = rb.init().id") == here().id


def test_the_cluster_outlives_the_kernel_that_started_it(starter, guest):
    record = here()
    starter.kill()
    # it would take some time to end: a second is given to what must not happen
    assert guest.run("import time\ntime.sleep(1)\nout = sum(n['Alive'] for n in ray.nodes())") == 1
    assert here() == record and clusters.guard_alive(record)


def test_a_cluster_that_others_run_is_joined_by_address_and_never_stopped(guest, tmp_path):
    record = here()
    other = Kernel(tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=record.token_path)
    assert other.run(JOIN.format(f"address={record.address!r}")) == ["", record.address, 2, False]
    assert other.run("out = repr(c)").endswith("run by others)")
    other.run("rb.shutdown()\nrb.shutdown()")
    other.end()
    assert clusters.guard_alive(record) and guest.run("out = ray.is_initialized()")


def test_without_the_token_nobody_gets_in(starter, tmp_path):
    # Ray would try for twenty seconds, and at the outer address, where nothing listens
    stranger = Kernel(tmp_path, RAY_NUM_REDIS_GET_RETRIES="2", **head.ONE_MACHINE)
    with pytest.raises(Refused, match="ConnectionError"):
        stranger.run(ALONE.format(here().address))
    with pytest.raises(Refused, match=r"ClusterError: .*wants its token: set RAY_AUTH_MODE=token"):
        stranger.run(JOIN.format(f"address={here().address!r}"))
    stranger.end()


def test_a_named_session_keeps_the_cluster_when_its_kernel_leaves(guest, state):
    record = here()
    guest.run("from rlbench.dispatch.link import Link\nwith rb.init():\n    Link.create('keeper', lease_s=600)")
    assert not guest.run("import ray\nout = ray.is_initialized()") and clusters.guard_alive(record)
    assert [s["name"] for s in registry.live_sessions(record.id)] == ["keeper"]
    own = f"c = rb.init(address={record.address!r})\nout = [c.id, c.ours]"
    assert guest.run(own) == [record.id, True]  # by its address, too, it is ours


def test_a_killed_guard_leaves_nothing_to_the_next_init(guest, state):
    record = here()
    left = leave_shared_memory(record)
    guest.run("rb.shutdown()")  # leaves the session there
    os.kill(record.guard_pid, signal.SIGKILL)
    until(lambda: not clusters.guard_alive(record))  # a busy machine takes its time to end a process
    assert processes.session_members(record.ray_session)
    fresh = guest.run("out = rb.init(devices=1).id")
    assert fresh != record.id and here().id == fresh and is_gone(record) and not left.exists()
    assert not list((state / "rlbench" / "sessions").iterdir())


def test_when_ray_breaks_the_guard_ends_all_of_it_and_who_waits_is_told(guest):
    record = here()
    guest.run(WAITING)
    leave_shared_memory(record)
    (raylet,) = [
        pid
        for pid in processes.session_members(record.ray_session)
        if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"
    ]
    os.kill(raylet, signal.SIGKILL)
    until(lambda: is_gone(record))
    for waits in ("waiting.result()", "link.state()"):
        with pytest.raises(
            Refused, match="ClusterEnded: session 'waits' is gone: the cluster that it ran on has ended"
        ):
            guest.run(waits)
    guest.run("link.close()")


@pytest.mark.long
def test_a_kernel_outlives_the_cluster_that_ended_under_it(state):
    """Ray ends a process that cannot reach its cluster for a minute."""
    kernel = Kernel(state)
    kernel.run(JOIN.format("devices=1"))
    clusters.stop_cluster(here())
    time.sleep(75)
    assert kernel.run("out = rb.init(devices=1).devices") == 1
    kernel.run("rb.shutdown()")
    kernel.end()


def test_the_context_manager_ends_an_empty_cluster_with_every_process_and_twice_is_safe(guest):
    record_id = guest.run(
        "with rb.init(devices=1) as c:\n    out = c.id\n    from rlbench.runtime import registry\n"
        "    record = registry.read_cluster()"
    )
    session = guest.run("out = [record.ray_session, record.guard_pid, record.temp_dir]")
    assert record_id and processes.session_members(session[0]) == []
    assert processes.start_time(session[1]) is None and not Path(session[2]).exists()
    assert registry.read_cluster() is None
    guest.run("rb.shutdown()\nrb.shutdown()")
