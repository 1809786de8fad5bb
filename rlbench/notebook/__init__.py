"""How things look in a cell. `install()` registers formatters and progress views; the rooms below need not know."""

from typing import TYPE_CHECKING

from rlbench.lazy import lazy_names
from rlbench.notebook.charts.chart import Curves
from rlbench.notebook.formatters import install

if TYPE_CHECKING:
    from rlbench.notebook.rollouts.viewer import viewer

__all__ = ["Curves", "install", "viewer"]

# `viewer` on first use: widgets are not imported for those who only hold a session
__getattr__, __dir__ = lazy_names(__name__, {"viewer": "rollouts.viewer"})
