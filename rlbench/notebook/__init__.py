"""How things look in a cell. `install()` registers formatters and progress views; the rooms below need not know."""

from rlbench.notebook.curves import Curves
from rlbench.notebook.formatters import install

__all__ = ["Curves", "install"]
