"""What the workers of a session wrote: the files of our cluster's log folder, found by process number."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlbench.errors import SessionError, nearest
from rlbench.runtime import registry


def chosen(record: Mapping[str, Any], worker: str | None) -> dict[str, int]:
    """Pids by short name (`actor/0`, `inference/0`): of all workers, or of the one named (`inference`: all of that
    engine; `monitor`). Raises SessionError naming those there are."""
    prefix = f"rlbench/{record['name']}/"
    workers = {name.removeprefix(prefix): int(pid) for name, (pid, _) in record.get("workers", {}).items()}
    if worker is None:
        return workers
    known = workers | {"monitor": int(record["pid"])}
    found = {name: pid for name, pid in known.items() if worker in (name, name.split("/")[0])}
    if not found:
        raise SessionError(f"no worker {worker!r}{nearest(worker, known)}; there are {', '.join(known)}")
    return found


def files_of(record: Mapping[str, Any], pid: int) -> list[Path]:
    """The files process `pid` wrote. Raises SessionError where the session's cluster keeps its logs elsewhere."""
    cluster = registry.read_cluster()
    if cluster is None or cluster.id != record.get("cluster"):
        raise SessionError(
            f"session {record['name']!r} runs on a cluster that rlbench did not start: its logs lie in that cluster's "
            "folder (`ray logs`)"
        )
    return sorted([*cluster.logs.glob(f"worker-*-{pid}.out"), *cluster.logs.glob(f"worker-*-{pid}.err")])


def last_lines(path: Path, count: int) -> Iterator[str]:
    """The last lines of a file, without Ray's own markers."""
    with path.open(errors="replace") as file:
        lines = (line.rstrip("\n") for line in file if not line.startswith((":job_id:", ":actor_name:")))
        yield from collections.deque(lines, maxlen=count)
