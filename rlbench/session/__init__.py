"""The workbench: one object, one verb per cell."""

from rlbench.session.session import Session, attach, sessions

__all__ = ["Session", "attach", "sessions"]
