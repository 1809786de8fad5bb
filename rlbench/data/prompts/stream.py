"""A cursor over a set of prompts: takes the next ones, epoch by epoch, and says where it stands as plain JSON.

The order of an epoch is a function of seed and epoch alone, so the place is a handful of numbers, and a new process
that restores them goes on with exactly the prompt that would have come.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np

from rlbench.data.prompts.prompt import Prompt
from rlbench.errors import DataError, Suggesting

if TYPE_CHECKING:
    from rlbench.data.prompts.set import PromptSet

OnEnd = Literal["repeat", "stop"]
FORMAT = 1


class PromptStream(Suggesting):
    """Takes prompts from a set, without end or for so many epochs. Made by `PromptSet.stream`.

    The one thing here that changes: `take` moves it forward, `restore` puts it elsewhere.

    `epoch`: passes completed. `position`: prompts taken in this one. `taken`: prompts taken in all.
    """

    KIND: ClassVar[str] = "stream"

    def __init__(self, prompts: PromptSet, seed: int, shuffle: bool, on_end: OnEnd, epochs: int | None) -> None:
        if not len(prompts):
            raise DataError(f"{prompts.name or 'the set'} has no prompts to stream")
        if on_end not in ("repeat", "stop"):
            raise DataError(f"on_end={on_end!r}: wanted 'repeat' or 'stop'")
        if epochs is not None and (on_end == "repeat" or not isinstance(epochs, int) or epochs < 1):
            raise DataError(f"epochs={epochs!r}: wanted a whole number, at least one, and on_end='stop'")
        self.prompts = prompts
        self.seed = checked_seed(seed)
        self.shuffle = bool(shuffle)
        self.epochs = None if on_end == "repeat" else epochs or 1
        self.epoch = self.position = 0
        self._order = self._order_of(0)

    @property
    def taken(self) -> int:
        """Prompts taken so far, over all epochs."""
        return self.epoch * len(self.prompts) + self.position

    @property
    def ended(self) -> bool:
        """Whether nothing is left to take."""
        return self.epochs is not None and self.epoch >= self.epochs

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts, over the end of an epoch where it repeats; fewer, or none, where it stops."""
        check_count(n)
        taken: list[Prompt] = []
        while len(taken) < n and not self.ended:
            taken.append(self.prompts.prompts[self._order[self.position]])
            self.position += 1
            if self.position == len(self.prompts):
                self.go_to((self.epoch + 1, 0))
        return taken

    def batches(self, n: int) -> Iterator[list[Prompt]]:
        """Yield `take(n)` until it ends; the last one may be shorter."""
        while prompts := self.take(n):
            yield prompts

    def copy(self) -> Self:
        """Another stream of the same prompts, at the same place; each goes on by itself."""
        return copy.copy(self)

    def state(self) -> dict[str, Any]:
        """Where it stands, as plain JSON of a fixed small size; `restore` takes it, in any process."""
        return {
            "format": FORMAT,
            "kind": self.KIND,
            "set": {"prompts": len(self.prompts), "fingerprint": self.prompts.fingerprint},
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epochs": self.epochs,
            "epoch": self.epoch,
            "position": self.position,
        }

    def restore(self, state: Mapping[str, Any]) -> Self:
        """Go to where `state` was taken, and return the stream.

        DataError for what is no state of a stream, or of other prompts or options; nothing has moved then.
        """
        self.go_to(self.place_of(state))
        return self

    def place_of(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Epoch and position in a state that fits this stream; raises DataError for any other."""
        check_state(state, self.state(), ("epoch", "position"), self.prompts.name)
        epoch, position = place = state["epoch"], state["position"]
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position < len(self.prompts):
            raise DataError(
                f"restore: epoch {epoch!r} and position {position!r} are no place among {len(self.prompts)} prompts"
            )
        return place

    def go_to(self, place: tuple[int, int]) -> None:
        """Move to an epoch and a position in it."""
        self.epoch, self.position = place
        self._order = self._order_of(self.epoch)

    def __repr__(self) -> str:
        last = "" if self.epochs is None else f" of {self.epochs}"
        at = "ended" if self.ended else f"epoch {self.epoch + 1}{last}, {self.position} of {len(self.prompts)} prompts"
        order = f"shuffled, seed {self.seed}" if self.shuffle else "in order"
        return f"PromptStream({self.prompts.name + ': ' if self.prompts.name else ''}{at} · {order})"

    def _order_of(self, epoch: int) -> np.ndarray:
        count = len(self.prompts)
        return permutation(count, self.seed, epoch) if self.shuffle else np.arange(count)


def permutation(count: int, seed: int, *more: int) -> np.ndarray:
    """Return an order of `count` things, (count,) int64, the same under every version of numpy."""
    # the stream of RandomState is frozen (NEP 19), that of default_rng is not
    return np.random.RandomState([checked_seed(seed), *more]).permutation(count)


def checked_seed(seed: int) -> int:
    """A seed that can be used. Raises DataError."""
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise DataError(f"seed={seed!r}: wanted a whole number from 0 to 2**32 - 1")
    return int(seed)


def check_count(n: int) -> None:
    """Refuse a number of prompts that cannot be taken."""
    if not isinstance(n, int | np.integer) or n < 1:
        raise DataError(f"take({n!r}): wanted a whole number of prompts, at least one")


def check_state(state: Any, own: Mapping[str, Any], place: Collection[str], name: str) -> None:
    """Refuse a state that differs from one's own in more than its `place`. Raises DataError."""
    if not isinstance(state, Mapping) or set(state) != set(own):
        raise DataError(f"restore: wanted what .state() of a {own['kind']} gave, got {str(state)[:60]}")
    for field, now in own.items():
        if field not in place and state[field] != now:
            why = f"has {field}={state[field]!r}, this {own['kind']} {field}={now!r}"
            if field == "set":
                things = "texts" if own["kind"] == "texts" else "prompts"
                why = f"is of other {things} ({state[field]['prompts']}; there are {own[field]['prompts']} now)"
            raise DataError(
                f"restore: the state{name and f' of {name}'} {why}: make it as it was then, of the same data, or start "
                "anew"
            )
