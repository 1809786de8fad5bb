"""The verb of a session that keeps the place in its data with the rest of its state."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast, overload

from rlbench.data import Mixture, PromptStream
from rlbench.errors import DataError, SessionError

if TYPE_CHECKING:
    from rlbench.session.session import Session


class DataVerbs:
    """What `Session` inherits: follow."""

    _following: PromptStream | Mixture | None = None

    @overload
    def follow(self, data: None) -> None: ...
    @overload
    def follow(self, data: PromptStream | Mixture, fresh: bool = False) -> PromptStream | Mixture: ...

    def follow(self, data: PromptStream | Mixture | None, fresh: bool = False) -> PromptStream | Mixture | None:
        """Keep the place of a stream of prompts with the session: in snapshots, in checkpoints, for another kernel.

            prompts = session.follow(mixture)           # from here on
            session.rollout(prompts.take(64), n=8, max_tokens=256)

        Going back (`restore`, `undo`, `branch`) moves it back as well. In a session that was attached to or loaded, it
        first goes to where that session was.

        Args:
            data: of `PromptSet.stream` or `rb.data.mix`; None follows nothing any more and forgets the place.
            fresh: begin with other data: the stream stays where it is, and the place the session was at is forgotten.
                Snapshots taken before hold a place in the data of then, and cannot move this stream to it.

        Returns:
            The same stream.

        Raises:
            SessionError: neither a stream nor a mixture, or `fresh` without one.
            DataError: the session was with other prompts, weights or options.
        """
        if data is None:
            if fresh:
                raise SessionError("follow(None) forgets the place: fresh=True would have no effect on it")
            self._following = None
            cast("Session", self).link.set(cursor=None)
            return None
        if not isinstance(data, PromptStream | Mixture):
            raise SessionError(
                f"follow takes prompts.stream() or rb.data.mix(…), which have a place, got {type(data).__name__}"
            )
        known = None if fresh else self._cursor()
        if known is not None:
            try:
                data.restore(known)
            except DataError as other:
                said = f"{other}. To go on with other data in this session: session.follow(data, fresh=True)"
                raise DataError(said) from None
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
            try:
                self._following.restore(known)
            except DataError as other:  # the weights went back, and other data is followed since: that stays
                warnings.warn(f"the data that is followed stays where it is: {other}", UserWarning, stacklevel=2)
                self.note_place()

    def _cursor(self) -> Any:
        return cast("Session", self).link.state("cursor")["cursor"]
