"""Which files one of the processes that share the suite takes all of: what they start, others of them go on with."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

TAKES_RANKS = re.compile(r"^from tests\.ranks import", re.M)


def group_of(file: str, source: str) -> str:
    """Return the name of the group of files that one process takes; a file of no group is one by itself.

    The first file with ranks has their fork server import what they need, and each rank's process, which takes as long
    as a dozen tests; the first with a replica in its own process imports all of vLLM.
    """
    if TAKES_RANKS.search(source):
        return "ranks"
    return "replicas" if file.startswith("tests/workers/") else file


class GroupScheduling(LoadFileScheduling):
    """Gives each process a file after another, as `--dist loadfile` does, and a group of files as if it were one."""

    def _split_scope(self, nodeid: str) -> str:
        return _group_in(self.config.rootpath, super()._split_scope(nodeid))


@functools.cache
def _group_in(root: Path, file: str) -> str:
    return group_of(file, (root / file).read_text())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    """Group files where the whole suite runs: of a few rooms, the ranks' files are the most, and better shared out."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return GroupScheduling(config, log) if whole and config.option.dist == "loadfile" else None
