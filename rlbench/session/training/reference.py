"""The verb that moves a session's reference; see `rlbench.session.state.reference` for what becomes of it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from rlbench.dispatch.chain import ChainStep
from rlbench.results import Done
from rlbench.session.core import SessionCore
from rlbench.session.setup_options import check_keep
from rlbench.session.state import step_copies
from rlbench.session.state.reference import forget_moved, moved_steps


def update_reference(core: SessionCore, keep: float = 0.0) -> Generator[ChainStep, Any, Done]:
    """Move the reference to the policy as it is now, or a little towards it.

        session.update_reference()            # reference = policy
        session.update_reference(keep=0.99)   # 0.99 · reference + 0.01 · policy

    `rb.Train(reference=rb.EMA(0.99))` and `rb.every(50)` do so by themselves. `undo`, `restore` and `branch` bring it
    back to where it was, `heal`, `save` and `park` keep it where it is. Each move writes its weights into the session's
    folder, on disk.

    Args:
        keep: share of the reference's own weights that stays, in [0, 1).
    """
    check_keep(keep)
    core.link.set(reference=(yield from moved_steps(core, keep)))
    forget_moved(core)
    yield from step_copies.after_step_steps(core)
    return Done(f"the reference is {f'{1 - keep:g} of ' if keep else ''}the policy at step {core.step}")
