"""Garbage of a process that lives through many tests: what has been looked through is set aside, and stays so."""

from __future__ import annotations

import gc

set_aside = gc.freeze
"""Have no garbage looked for any more among what there is now: imports, most of all."""


def let_nobody_undo_it() -> None:
    """Keep vLLM from it: it sets each engine aside, and at its end has all that was ever imported looked through again,
    twice."""
    gc.freeze = gc.unfreeze = lambda: None
