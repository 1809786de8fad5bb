"""The place in a stream of prompts, kept with the rest of a session's state."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from rlbench.data import Mixture, PromptStream
from rlbench.dispatch.link import Link
from rlbench.errors import DataError, SessionError

D = TypeVar("D", PromptStream, Mixture, None)


class Followed:
    """The data that a session follows."""

    def __init__(self, link: Link) -> None:
        self.data: PromptStream | Mixture | None = None
        self._link = link

    def note_place(self) -> None:
        """Tell the monitor where the stream stands."""
        if self.data is not None:
            self._link.set(cursor=self.data.state())

    def move_place(self) -> None:
        """Put the stream where the session now stands."""
        place = self._place() if self.data is not None else None
        if place is not None and self.data is not None:
            try:
                self.data.restore(place)
            except DataError as other:  # the weights went back, and other data is followed since: that stays
                warnings.warn(f"the data that is followed stays where it is: {other}", UserWarning, stacklevel=2)
                self.note_place()

    def follow(self, data: D, fresh: bool = False) -> D:
        """See `rlbench.Session.follow`."""
        if data is None:
            if fresh:
                raise SessionError("follow(None) forgets the place: fresh=True would have no effect on it")
            self.data = None
            self._link.set(cursor=None)
            return None
        if not isinstance(data, PromptStream | Mixture):
            raise SessionError(
                f"follow takes prompts.stream() or rb.data.mix(…), which have a place, got {type(data).__name__}"
            )
        place = None if fresh else self._place()
        if place is not None:
            try:
                data.restore(place)
            except DataError as other:
                said = f"{other}. To go on with other data in this session: session.follow(data, fresh=True)"
                raise DataError(said) from None
        self.data = data
        self.note_place()
        return data

    def _place(self) -> Any:
        return self._link.state("cursor")["cursor"]
