"""A node leaves the cluster: what ran there is told as lost with its node, and the rest goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlbench.dispatch.link import Link, spawn_host
from rlbench.errors import WorkerDied
from rlbench.runtime import head, processes
from tests.clock import LIMIT_S, until
from tests.echo_engine import submit

pytestmark = pytest.mark.engine
JOIN = """
from ray._private import services
from ray.scripts.scripts import main
services.resolve_ip_for_localhost = lambda host: host  # our clusters are one machine's, so Ray refuses a second node
main()
"""


@pytest.fixture
def second_node(cluster: Any, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A second raylet beside the head: its node id and its process session."""
    import ray

    environment = {k: v for k, v in head.environment(tmp_path).items() if k not in head.ONE_MACHINE}
    known = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    raylet = subprocess.Popen(
        [
            sys.executable,
            "-c",
            JOIN,
            "start",
            f"--address={cluster.address}",
            "--block",
            "--num-cpus=1",
            "--node-ip-address=127.0.0.1",
            f"--object-store-memory={128 << 20}",
            "--disable-usage-stats",
            "--dashboard-agent-listen-port=0",
            "--min-worker-port=0",
            "--max-worker-port=0",
        ],
        env=environment,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        joined = until(lambda: [n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in known])
        yield joined[0]["NodeID"], raylet.pid
    finally:
        processes.end_session(raylet.pid)
        raylet.wait(10)


@pytest.mark.curve
def test_a_worker_whose_node_is_lost_says_so_and_the_session_lives_on(cluster: Any, second_node: Any) -> None:
    import ray

    node, process_session = second_node
    here, there = (
        {"scheduling_strategy": ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(id_, soft=False)}
        for id_ in (ray.get_runtime_context().get_node_id(), node)
    )
    link = Link.create("nodeloss")
    try:
        far, near = (
            spawn_host(link, name, 0, "tests.targets:EchoTarget", (0,), {}, {"num_cpus": 0} | place)
            for name, place in (("far", there), ("near", here))
        )
        assert os.getsid(ray.get(far.pid.remote())) == process_session != os.getsid(ray.get(near.pid.remote()))
        for name in ("far", "near"):
            link.engine(name, {"kind": "train", "actors": [f"rlbench/nodeloss/{name}/0"], "info": {}})
        assert submit(link, far, "echo", 1).result() == ((1,), {})
        running = link.submit("far", ["rank 0"], [far], "slowly", [((600.0,), {})], lambda values: values[0])
        until(lambda: ray.get(far.running.remote()) == "slowly")
        worker = ray.get(far.pid.remote())
        # the worker last: a raylet that still sees it die tells of that alone
        for pid in sorted(processes.session_members(process_session), key=lambda pid: pid == worker):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="rank 0 of far died: its node left the cluster"):
            running.result(timeout=LIMIT_S)
        assert submit(link, near, "echo", 2).result() == ((2,), {})
        assert link.state("engines")["engines"]["far"]["broken"] == "rank 0 died"
    finally:
        link.close()
