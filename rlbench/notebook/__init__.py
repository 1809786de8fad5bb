"""How things look in a cell. `install()` registers formatters and progress views; the rooms below need not know."""

from typing import Any

from rlbench.notebook.curves import Curves
from rlbench.notebook.formatters import install

__all__ = ["Curves", "install", "viewer"]


def __getattr__(name: str) -> Any:
    """`viewer` on first use: widgets are not imported for those who only hold a session."""
    if name == "viewer":
        from rlbench.notebook.rollout_viewer import viewer

        return viewer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
