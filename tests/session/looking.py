"""A session as its monitor tells it to somebody else."""

from rlbench.monitor import client


def state(session):
    return client.ask(client.find(session.name), "/state")


def generates(session):
    """Whether the rollout that runs has tokens by now."""
    running = state(session)["running"]
    return any(told.get("tokens", 0) > 0 for call in running for told in call["progress"])
