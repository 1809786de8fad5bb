"""`session.sync_weights(transport=…)` asks for that transport, and for the best one where it is left out."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlbench.session import core, verbs


@pytest.mark.parametrize("transport", [None, "shm", "ipc", "broadcast"])
def test_the_transport_is_passed_through(monkeypatch: pytest.MonkeyPatch, transport: str | None) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(core, "sync_weights", lambda *args: calls.append(args))
    session: Any = object.__new__(core.SessionCore)
    session.engines = {"actor": "trainer", "inference": "replicas"}
    session.options = SimpleNamespace(kind="policy")
    state = {"branch": "idea", "version": 3, "adapters": {"main": 1, "idea": 2}}
    session.link = SimpleNamespace(asking=lambda *keys: lambda: {key: state[key] for key in keys})
    verbs.sync_weights(session, **({} if transport is None else {"transport": transport}))
    ((train, infer, asking, asked),) = calls
    assert (train, infer, asking()(), asked) == ("trainer", "replicas", (3, 2), transport)
    session.synced(7)
    assert calls[1][2]()() == (7, 2), "of the version that was asked for"
