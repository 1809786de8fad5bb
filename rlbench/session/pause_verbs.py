"""The verbs of a session that hold its generation where it is, and let it go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rlbench.results import Done
from rlbench.session.recording import recorded

if TYPE_CHECKING:
    from rlbench.session.session import Session


class PauseVerbs:
    """What `Session` inherits: pause, resume, paused."""

    @recorded
    def pause(self) -> Done:
        """Hold generation on every replica after its current step: requests and KV cache stay, nothing is computed.

        Of a rollout that runs (`block=False`, another thread, the panel), or of the next one, which then waits.
        `resume()` goes on with the very same tokens; a stop works meanwhile and gives what there is.
        """
        cast("Session", self).link.pause(True)
        return Done("generation is held", "session.resume() goes on")

    @recorded
    def resume(self) -> Done:
        """Let generation go on where `pause()` held it."""
        cast("Session", self).link.pause(False)
        return Done("generation goes on")

    @property
    def paused(self) -> bool:
        """Whether generation is held."""
        return bool(cast("Session", self).link.state("paused")["paused"])
