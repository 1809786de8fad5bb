"""The workbench: one object, one verb per cell."""

from rlbench.session.options import Inference, Train
from rlbench.session.session import Session, attach, sessions

__all__ = ["Inference", "Session", "Train", "attach", "sessions"]
