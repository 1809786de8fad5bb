"""A session as its monitor tells it to somebody else."""

from rlbench.monitor import client


def state(session):
    return client.ask(client.find(session.name), "/state")
