"""What a session trains otherwise than as it was built (optimizer, schedule, frozen parameters), told to its ranks.

The monitor has it as `setup`; each snapshot keeps the one it was taken by, and going back brings that one back.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from rlbench.dispatch.chain import Steps
from rlbench.session.core import SessionCore


def setup_of(core: SessionCore) -> dict[str, Any]:
    """Return the setup the session trains by; empty: as it was built."""
    return dict(core.link.state("setup")["setup"])


def set_up_steps(core: SessionCore, setup: Mapping[str, Any], what: str) -> Steps:
    """Let the ranks train by a setup, and put it on record."""
    if setup or setup_of(core):
        found = yield core.ask_ranks("set_up", dict(setup), what=what, track=True)
        core.link.set(setup=dict(setup))
        note_setup(core, found)


def note_setup(core: SessionCore, found: Mapping[str, Any]) -> None:
    """Show what the ranks say of their setup; warn where the trainer went with the optimizer that it stepped."""
    core.train.note_info(optimizer=found["optimizer"], trainable=found["trainable"])
    if found["trainer"]:
        core.trainer = None
        warnings.warn(
            "the session's trainer stepped the optimizer of before and is gone with it: session.trainer(…) makes one",
            stacklevel=2,
        )
