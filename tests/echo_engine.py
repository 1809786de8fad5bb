"""One echoing worker in a session of its own, for tests of the monitor and the command line."""

from __future__ import annotations

from typing import Any

from rlbench.dispatch.link import Link, spawn_host


def echo(link: Link) -> tuple[Any, int]:
    """Start the worker and put it on record as an engine; returns its actor and pid."""
    import ray

    host = spawn_host(link, "echo", 0, "tests.targets:EchoTarget", (0,), {}, {"num_cpus": 0})
    pid = ray.get(host.pid.remote())
    name = f"rlbench/{link.name}/echo/0"
    link.engine("echo", {"kind": "train", "actors": [name], "pids": {name: pid}, "info": {}})
    return host, pid


def submit(link: Link, host: Any, name: str, *args: Any, **options: Any) -> Any:
    """Send the worker one call."""
    return link.submit("echo", ["rank 0"], [host], name, [(args, {})], lambda values: values[0], **options)
