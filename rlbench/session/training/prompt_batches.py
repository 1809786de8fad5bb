"""The prompts of a loop's steps, which may be drawn before anybody is given what they lead to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rlbench.data import Mixture, Prompt, PromptStream
from rlbench.data.prompts.prompt import is_chat_or_tokens
from rlbench.errors import DataError

WANTED = "pipeline takes batches of prompts, [[…], […], …], one for each step; or prompts.stream() with batch=…"


class PromptBatches(Protocol):
    """`draw` gives the prompts of one step after the other, `give` counts the first of them as used."""

    @property
    def moved(self) -> bool:
        """Whether somebody else has moved it since the last `give` or `rewind`."""

    def draw(self) -> Any:
        """The prompts of the next step; None where there are no more."""

    def give(self) -> None:
        """Count the step whose prompts were drawn first, of those that do not count yet."""

    def rewind(self) -> None:
        """Draw those that do not count yet once more."""


class ListedBatches:
    """Batches that a user has made. Those of an iterator that were drawn and do not count are gone with the loop."""

    moved = False

    def __init__(self, batches: Iterable[Any]) -> None:
        self._rest = iter(batches)
        self._drawn: deque[Any] = deque()
        self._again: deque[Any] = deque()

    def draw(self) -> Any:
        prompts = self._again.popleft() if self._again else next(self._rest, None)
        if prompts is None:
            return None
        if isinstance(prompts, str | Mapping | Prompt) or is_chat_or_tokens(prompts):
            raise DataError(f"{WANTED}. A batch that is one prompt is [prompt]; got {type(prompts).__name__}")
        self._drawn.append(prompts)
        return prompts

    def give(self) -> None:
        self._drawn.popleft()

    def rewind(self) -> None:
        self._again.extendleft(reversed(self._drawn))
        self._drawn.clear()


class StreamBatches:
    """The next `size` prompts of a stream, which itself stands behind those that count: others are drawn of a copy."""

    def __init__(self, stream: PromptStream | Mixture, size: int) -> None:
        self._stream, self._size = stream, size
        self.rewind()

    @property
    def moved(self) -> bool:
        return self._stream.state() != self._place

    def draw(self) -> Any:
        return self._copy.take(self._size) or None

    def give(self) -> None:
        self._stream.take(self._size)
        self._place = self._stream.state()

    def rewind(self) -> None:
        self._copy, self._place = self._stream.copy(), self._stream.state()


def batches_of(prompts: Any, size: int | None) -> PromptBatches:
    """What a user gives as the prompts of a loop; DataError for anything else."""
    if isinstance(prompts, PromptStream | Mixture):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise DataError(f"batch={size!r}: how many prompts of the stream make one batch? a whole number from 1 on")
        return StreamBatches(prompts, size)
    if prompts is None:
        raise DataError(f"{WANTED}. Without prompts it takes the stream that the session follows, and it follows none")
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | Mapping):
        raise DataError(f"{WANTED}; got {type(prompts).__name__}")
    if size is not None:
        raise DataError(f"batch={size!r} would have no effect: it cuts a stream, and these are batches already")
    return ListedBatches(prompts)
