"""How a replica serves. No vLLM: the driver makes it, the replica reads it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ServeOptions:
    """`journal`: file that its calls go to. `models`: by the name a client asks for, the number of an adapter, None for
    the one synced last; the first is the policy. `port`: 0 takes a free one. `template`: of the chat template.
    `fetch_images`: read images at http addresses. `across_syncs`: calls under way go on with weights that come."""

    journal: str
    models: Mapping[str, int | None]
    key: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    fetch_images: bool = False
    across_syncs: bool = False


def replica_of(run: str, count: int) -> int:
    """Return which of `count` replicas serves a named run."""
    return zlib.crc32(run.encode()) % count
