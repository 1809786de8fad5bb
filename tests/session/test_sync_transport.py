"""`session.sync_weights(transport=…)` asks for that transport, and for the best one where it is left out."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlbench.session import session as sessions


@pytest.mark.parametrize("asked", [None, "shm", "ipc", "broadcast"])
def test_the_transport_is_passed_through(monkeypatch: pytest.MonkeyPatch, asked: str | None) -> None:
    seen: list[Any] = []
    chain = SimpleNamespace(blocking_result=lambda: "done")
    monkeypatch.setattr(sessions, "sync_weights", lambda *given: seen.append(given) or chain)
    session: Any = SimpleNamespace(train="trainer", inference="replicas", version=3)
    sync_weights = sessions.Session.sync_weights.__wrapped__  # without its record, which needs a real session
    options = {} if asked is None else {"transport": asked}
    assert sync_weights(session, **options) == "done"
    assert sync_weights(session, block=False, **options) is chain
    assert seen == [("trainer", "replicas", 3, asked)] * 2
