"""The control verbs of a session without its kernel, in a process its monitor spawns (`rlbench.monitor.operators`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlbench.dispatch.link import Link
from rlbench.errors import SessionError, Stopped
from rlbench.runtime import cluster
from rlbench.session.core import SessionCore
from rlbench.session.record.cells import OPERATOR_PLACE
from rlbench.session.session import Session, handle_of


def operate(name: str, cluster_id: str, epoch: int, verb: str, args: dict[str, Any]) -> dict[str, Any]:
    """Run `verb` on session `name` under an epoch of its monitor; returns plain values.

    Raises what the verb raises; SessionError where it was stopped, which is an error to nobody but who waits for it.
    """
    cluster.join_own_worker(cluster_id)
    link = Link.operate(name, epoch)
    session = handle_of(SessionCore.attach(link))
    session.core.recorder.place = OPERATOR_PLACE
    try:
        return _run(session, verb, args)
    except Stopped as stopped:
        raise SessionError(f"{verb} was stopped: {stopped}") from None
    finally:
        link.release()


def _run(session: Session, verb: str, args: dict[str, Any]) -> dict[str, Any]:
    if verb in ("offload", "onload"):
        return dict(getattr(session, verb)(args["engine"], *args.get("parts", ())))
    if verb == "sync":
        return dict(session.sync_weights(args.get("transport")))
    if verb == "snapshot":
        kept = dataclasses.asdict(session.snapshot(args.get("label"), args.get("disk", False)))
        return {key: value for key, value in kept.items() if key != "folder"}
    if verb == "park":
        return dict(session.park(args.get("drop_gradients", False)))
    raise SessionError(f"an operator has no verb {verb!r}")
