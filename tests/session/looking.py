"""A session as its monitor tells it to somebody else."""

import time

from rlbench.monitor import client


def until(true, seconds=120.0):
    """Wait for something that other processes bring about."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def state(session):
    return client.ask(client.find(session.name), "/state")
