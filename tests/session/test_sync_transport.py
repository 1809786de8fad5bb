"""`session.sync_weights(transport=…)` asks for that transport, and for the best one where it is left out."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlbench.session.verbs import placement


@pytest.mark.parametrize("asked", [None, "shm", "ipc", "broadcast"])
def test_the_transport_is_passed_through(monkeypatch: pytest.MonkeyPatch, asked: str | None) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(placement, "started_sync", lambda *given: seen.append(given))
    core: Any = SimpleNamespace(train="trainer", inference="replicas", version=3)
    placement.sync_weights(core, **({} if asked is None else {"transport": asked}))
    assert seen == [("trainer", "replicas", 3, asked)]
