"""One replica on a tiny random model for a file of tests of several turns, stepped on a thread beside the main one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlbench.data.rollouts.jobs import GenerateJob

from .turns import Lane, Rows


@pytest.fixture(scope="package")
def turn_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from .tiny_checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("turns"), tied=True)


@pytest.fixture(scope="package")
def turn_lane() -> Iterator[Lane]:
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute") as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture(scope="module")
def turn_replica(turn_folder: Path, turn_lane: Lane) -> Iterator[Any]:
    """One for each file: another file's replica, at its end, ends the groups of all that this process has."""
    from rlbench.workers.replica.config import ReplicaConfig
    from rlbench.workers.replica.vllm import VllmReplica
    from tests.workers.ending import end_here

    config = ReplicaConfig(str(turn_folder), dtype="float32", kv_cache_bytes=256 << 20, max_num_seqs=32)
    replica = VllmReplica(config)
    turn_lane(replica.build)
    yield replica
    turn_lane(end_here, replica)


@pytest.fixture
def draw(turn_replica: Any, turn_lane: Lane) -> Callable[[GenerateJob], Rows]:
    """Serves a job; what came of it, by sample."""
    return lambda one: Rows(turn_lane(turn_replica.generate, one))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The context of the call in progress."""
    from rlbench.dispatch import context as dispatch_context
    from rlbench.dispatch.context import CallContext

    context = CallContext()
    monkeypatch.setattr(dispatch_context, "_current", context)
    return context
