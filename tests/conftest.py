"""Shared engines and folders: one cluster and one state folder for the whole run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_STATE = tempfile.mkdtemp(prefix="rlb-test-state-")
os.environ["XDG_STATE_HOME"] = _STATE  # before anything looks for a running cluster: tests have one of their own


@pytest.fixture(scope="session")
def cluster() -> Iterator[object]:
    """Our own Ray cluster with four device slots; ended, with everything on it, after the last test."""
    import shutil

    import rlbench as rb
    from rlbench.runtime import cluster as clusters
    from rlbench.runtime import registry

    yield rb.init(devices=4)
    record = registry.read_cluster()
    rb.shutdown()
    if record is not None and clusters.guard_alive(record):
        clusters.stop_cluster(record)
    shutil.rmtree(_STATE, ignore_errors=True)


@pytest.fixture(scope="session")
def tests_dir() -> Path:
    return Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none, with the reason."""
    from rlbench.setup.plan import has_nvidia_gpu

    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_nvidia_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, this machine has none"))
