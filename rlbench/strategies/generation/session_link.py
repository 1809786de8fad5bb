"""How ranks reach their session: `connect` is told from above where that lives, as a strategy knows no engine."""

from __future__ import annotations

import importlib
import os
from typing import Any

from rlbench.dispatch import context
from rlbench.errors import EngineError

SESSION = "RLBENCH_SESSION"
"""Environment variable: the session whose engines ranks of no session, as `torchrun` starts them, use."""

ASLEEP = "asleep_by_ranks"
"""Of the inference engine's record: training ranks had it sleep, so it is to wake when they are gone."""

_home = ""


def connect(home: str) -> None:
    """Name the class of a session's end on its ranks, `module:Class`; it is imported on first use."""
    global _home
    _home = home


def session_of_ranks() -> Any:
    """Return the session of the call that runs, or the one that the environment names."""
    if not (context.current().worker or os.environ.get(SESSION)):
        raise EngineError(
            "setup_inference_engine: this process is on no session's ranks. Run the script there, by "
            "session.train.run('train.py', args=[…]) or %ranks train.py …; or make a session, "
            f"rb.Session(…, name='demo'), and start the script with {SESSION}=demo in its environment."
        )
    module, _, attribute = _home.partition(":")
    return getattr(importlib.import_module(module), attribute).here()
