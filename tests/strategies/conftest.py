"""What the tests of the strategy surface share: a tiny model on disk, and two ranks to run functions on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.modules import qwen_on_meta
from tests.ranks import Ranks, ranks


@pytest.fixture(scope="module")
def engine(qwen: str) -> Iterator[Ranks]:
    """Two ranks in processes of their own; `engine.run(fn)` gives one result per rank."""
    with ranks(2, qwen_on_meta(qwen)) as made:
        yield made
