"""In which order the processes that share the suite take its files, and which files one of them takes all of: what a
file starts, others go on with, and what no file behind it needs is ended."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

TAKES_RANKS = re.compile(r"^from tests\.ranks import", re.M)
RANKS, REPLICAS = "ranks", "replicas"


def group_of(file: str, source: str) -> str:
    """Return the name of the group of files that one process takes; a file of no group is one by itself.

    The first file with ranks has their fork server import what they need, and each rank's process, which takes as long
    as a dozen tests; the first with a replica in its own process imports all of vLLM.
    """
    if TAKES_RANKS.search(source):
        return RANKS
    return REPLICAS if file.startswith("tests/workers/") else file


def users_from(path: Path | None, items: Sequence[pytest.Item], fixture: str) -> set[Path]:
    """Return the files that use a fixture, from a file on in the order of the tests; None: of all."""
    first = 0 if path is None else next(index for index, item in enumerate(items) if item.path == path)
    return {item.path for item in items[first:] if fixture in getattr(item, "fixturenames", ())}


def in_order_of_run(items: Sequence[pytest.Item], root: Path) -> list[pytest.Item]:
    """Return the tests in the order in which several processes take their files, each kind by the number of its tests.

    The groups come first, which take one process long; then the files that use the shared session, and others that use
    the cluster, so that both can end soon.
    """
    of_session, of_cluster = (users_from(None, items, fixture) for fixture in ("shared_session", "cluster"))
    counts = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[bool, bool, bool, bool, int]:
        group = _group_in(root, item.path.relative_to(root).as_posix())
        kinds = group != RANKS, group != REPLICAS, item.path not in of_session, item.path not in of_cluster
        return *kinds, -counts[item.path]

    return sorted(items, key=place)


class OrderedScheduling(LoadFileScheduling):
    """Gives each process a file after another, as `--dist loadfile` does, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # by the number of tests: what is ended might be needed again


class GroupScheduling(OrderedScheduling):
    """Gives a group of files to one process, as if it were one file."""

    def _split_scope(self, nodeid: str) -> str:
        return _group_in(self.config.rootpath, super()._split_scope(nodeid))


@functools.cache
def _group_in(root: Path, file: str) -> str:
    return group_of(file, (root / file).read_text())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OrderedScheduling | None:
    """Group files where the whole suite runs: of a few rooms, the ranks' files are the most, and better shared out."""
    if config.option.dist != "loadfile":
        return None
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return GroupScheduling(config, log) if whole else OrderedScheduling(config, log)
