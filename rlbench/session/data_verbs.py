"""The verb of a session that keeps the place in its data with the rest of its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rlbench.data import Mixture, PromptStream
from rlbench.errors import SessionError

if TYPE_CHECKING:
    from rlbench.session.session import Session


class DataVerbs:
    """What `Session` inherits: follow."""

    _following: PromptStream | Mixture | None = None

    def follow(self, data: PromptStream | Mixture) -> PromptStream | Mixture:
        """Keep the place of a stream of prompts with the session: in snapshots, in checkpoints, for another kernel.

            prompts = session.follow(mixture)           # from here on
            session.rollout(prompts.take(64), n=8)

        Going back (`restore`, `undo`, `branch`) moves it back as well. In a session that was attached to or loaded, it
        first goes to where that session was.

        Args:
            data: of `PromptSet.stream` or `rb.data.mix`.

        Returns:
            The same stream.

        Raises:
            SessionError: neither a stream nor a mixture.
            DataError: the session was with other prompts, weights or options.
        """
        if not isinstance(data, PromptStream | Mixture):
            raise SessionError(
                f"follow takes prompts.stream() or rb.data.mix(…), which have a place, got {type(data).__name__}"
            )
        known = self._cursor()
        if known is not None:
            data.restore(known)
        self._following = data
        self.note_place()
        return data

    def note_place(self) -> None:
        """Tell the monitor where the followed stream stands."""
        if self._following is not None:
            cast("Session", self).link.set(cursor=self._following.state())

    def move_place(self) -> None:
        """Put the followed stream where the session now stands."""
        known = self._cursor() if self._following is not None else None
        if known is not None and self._following is not None:
            self._following.restore(known)

    def _cursor(self) -> Any:
        return cast("Session", self).link.state("cursor")["cursor"]
