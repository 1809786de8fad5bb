"""The verbs of a session that show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rlbench.session.session import Session


class ViewVerbs:
    """What `Session` inherits: dashboard."""

    def dashboard(self) -> Any:
        """A live view at the end of a cell: memory, lengths, metrics, time, and controls that act while a cell runs.

        Several views of one session share one sampler; each stays with its last numbers when the session is closed.
        """
        from rlbench.notebook.dashboard import Dashboard

        return Dashboard(cast("Session", self).name)
