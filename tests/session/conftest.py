"""How a shared session is put back behind a test."""

import pytest


@pytest.fixture
def put_back(session):
    """The shared session goes back to where it was after each test: these ask for equal numbers."""
    kept = session.snapshot()
    session.sync_weights()
    yield
    session.zero_grad()
    session.train.call_all("drop_trainer").result()  # no part of the snapshot, which is of before it
    session.core.trainer = None
    session.restore(kept)
    session.drop(kept)
