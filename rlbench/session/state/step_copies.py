"""The copies that a session keeps around its steps, so that `undo` and `heal` both lose nothing that was finished.

After a step (of a trainer: an iteration) the state is copied: that is what `heal` goes back to. Before the next one a
copy is made for `undo`. It shares the tensors of the one after the step before, which are not even read where nothing
but known verbs has run on the ranks since; where a user's own code has, they are compared, and copied where they
changed. So a step costs one copy, and `undo=1` holds two: before the last step, and after it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from rlbench.dispatch.chain import Steps
from rlbench.errors import CheckpointError, SessionError
from rlbench.session.state.snapshots import Snapshot, as_stood_at, free_steps, restore_steps, write_steps

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore


def before_step_steps(session: SessionCore) -> Steps:
    """Keep the state before a step; returns its `Snapshot`, None where the session keeps none.

    Want of room does not end the step: it is said, and the step then cannot be undone.
    """
    if session.undo_depth < 1:
        return None
    yield from _surplus_freed(session)
    try:
        kept = yield from write_steps(session, f"before step {session.step + 1}", automatic=True)
    except CheckpointError as error:
        warnings.warn(f"this step cannot be undone: {error}. rb.Session(…, undo=0) keeps none", stacklevel=2)
        return None
    return kept


def can_be_undone(session: SessionCore, before: Snapshot | None) -> None:
    """A step was taken that changed something: `undo` goes back to before it, if that was kept, and to before no more
    steps than asked for."""
    if session.undo_depth < 1:
        return
    stack = session.link.state("undo")["undo"]
    session.link.set(undo=[] if before is None else [*stack, before.id][-session.undo_depth :])


def after_step_steps(session: SessionCore) -> Steps:
    """Keep the state after a step that is on record, or after a checkpoint was loaded; what gives way is freed first.

    Want of room is said: were a worker lost before the next step, that step would be.
    """
    if session.undo_depth < 1:
        return
    yield from _surplus_freed(session)
    try:
        yield from write_steps(session, f"after step {session.step}", automatic=True)
    except CheckpointError as error:
        others = as_stood_at(session)
        to = f"go back to {others[-1].label!r}" if others else "go on without a snapshot"
        warnings.warn(f"step {session.step} is done but not kept, heal() would {to}: {error}", stacklevel=2)


def undo_steps(session: SessionCore, sync: bool) -> Steps:
    """Go back to before the last step; returns the snapshot, which stays as what `heal` goes back to."""
    stack = session.link.state("undo")["undo"]
    if not stack:
        raise SessionError(
            "there is no step to undo: none was taken since the session, or its last restore, began"
            if session.undo_depth
            else "nothing is kept to undo a step: rb.Session(…, undo=1) keeps the state before the last one"
        )
    snapshot = yield from restore_steps(session, stack[-1], sync)
    session.link.set(undo=stack[:-1])
    yield from _surplus_freed(session)
    return snapshot


def _surplus_freed(session: SessionCore) -> Steps:
    """Drop the copies around steps that neither `undo` nor `heal` would go back to."""
    state = session.link.state("snapshots", "undo")
    automatic = [id_ for id_, fields in state["snapshots"].items() if fields.get("automatic")]
    surplus = set(automatic[:-1]) - set(state["undo"])
    if surplus:
        yield from free_steps(session, [snapshot for snapshot in as_stood_at(session) if snapshot.id in surplus])
