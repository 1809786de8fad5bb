"""How a shared session is put back behind a test."""

import pytest

from tests.session.session_trainers import drop_trainer


@pytest.fixture
def put_back(session):
    """The shared session goes back to where it was after each test: these ask for equal numbers."""
    kept = session.snapshot()
    if session.inference.weight_versions() != [session.version]:
        session.sync_weights()
    yield
    session.zero_grad()
    drop_trainer(session)
    session.restore(kept)
    session.drop(kept)
