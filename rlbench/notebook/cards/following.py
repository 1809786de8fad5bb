"""A card that is drawn anew while what it tells of changes: an output that is updated, without a widget."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlbench.errors import RLBenchError
from rlbench.notebook.cards.card import WARNING, Card

if TYPE_CHECKING:
    from rlbench.session.endpoint.endpoint import Endpoint

LOOK_S = 1.0
_followed: dict[str, FollowedCard] = {}
"""By what they tell of: one is followed at a time, that which was shown last."""


class FollowedCard:
    """Shows a card and follows it on a thread; `what`: what it tells of, `look`: how it is now, and whether it
    changes no more."""

    def __init__(self, what: str, look: Callable[[], tuple[Card, bool]]) -> None:
        self._what, self._look = what, look
        self._ended = threading.Event()
        self._handle: Any = None
        self._shown, _ = look()

    def _ipython_display_(self) -> None:
        """Show it, in the place of the one before, which stays as it is."""
        from IPython.display import DisplayHandle

        if (before := _followed.get(self._what)) is not None:
            before.end()
        _followed[self._what] = self
        self._handle = DisplayHandle()
        self._handle.display(self._shown.bundle(), raw=True)
        threading.Thread(target=self._follow, daemon=True, name=f"rlbench {self._what}").start()

    def end(self) -> None:
        """Follow it no longer."""
        self._ended.set()

    def _follow(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                card, over = self._look()
            except RLBenchError as error:  # the session has ended, or what it asks is away
                said = f"{WARNING}{str(error).splitlines()[0]}"
                card, over = replace(self._shown, notes=[*self._shown.notes, said]), True
            if card.text() != self._shown.text():
                self._shown = card
                self._handle.update(card.bundle(), raw=True)
            if over:
                return


def endpoint_view(endpoint: Endpoint) -> FollowedCard:
    """Return an endpoint's card, whose counts are told anew until it is closed."""
    return FollowedCard(f"endpoint of {endpoint.core.name}", endpoint.look)
