"""A cursor over a set of prompts: takes the next ones, epoch by epoch, and says where it stands as plain JSON.

The order of an epoch is a function of seed and epoch alone, so the place is a handful of numbers, and a new process
that restores them goes on with exactly the prompt that would have come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeGuard

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

    def __init__(self, prompts: PromptSet, seed: int, shuffle: bool, on_end: OnEnd, epochs: int | None) -> None:
        if not len(prompts):
            raise DataError(f"{prompts.name or 'the set'} has no prompts to stream")
        self.prompts = prompts
        self.seed = checked_seed(seed)
        self.shuffle = bool(shuffle)
        self.epochs = epochs_of(on_end, epochs)
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
        checked_count(n)
        found: list[Prompt] = []
        while len(found) < n and not self.ended:
            found.append(self.prompts.prompts[self._order[self.position]])
            self.position += 1
            if self.position == len(self.prompts):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
        return found

    def batches(self, n: int) -> Iterator[list[Prompt]]:
        """`take(n)` until it ends; the last one may be shorter."""
        while found := self.take(n):
            yield found

    def state(self) -> dict[str, Any]:
        """Where it stands, as plain JSON of a fixed small size; `restore` takes it, in any process."""
        return {
            "format": FORMAT,
            "kind": "stream",
            "set": {"prompts": len(self.prompts), "fingerprint": self.prompts.fingerprint},
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epochs": self.epochs,
            "epoch": self.epoch,
            "position": self.position,
        }

    def restore(self, state: Mapping[str, Any]) -> Self:
        """Go to where `state` was taken, and return the stream.

        Raises:
            DataError: the state is none of a stream, of other prompts or of other options; nothing has moved then.
        """
        self.go_to(self.place_of(state))
        return self

    def place_of(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Epoch and position in a state that fits this stream; raises DataError for any other."""
        whose = self.prompts.name or "this set"
        checked_state(state, "stream", "set.stream(…).state()")
        was, now = state.get("set"), self.state()["set"]
        if was != now:
            before, after = (
                f"{one.get('prompts')} ({one.get('fingerprint')})" if isinstance(one, Mapping) else repr(one)
                for one in (was, now)
            )
            raise DataError(
                f"restore: the prompts of {whose} have changed since the state was taken: it knew {before}, now "
                f"there are {after}. Load the same data as then, or start a new stream"
            )
        check_same_options(self, state, ("seed", "shuffle", "epochs"))
        epoch, position = state.get("epoch"), state.get("position")
        if not _is_count(epoch) or not _is_count(position) or position >= len(self.prompts):
            raise DataError(
                f"restore: epoch {epoch!r} and position {position!r} are no place among {len(self.prompts)} prompts"
            )
        return epoch, position

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
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise DataError(f"seed={seed!r}: wanted a whole number from 0 to 2**32 - 1")
    return int(seed)


def checked_count(n: int) -> int:
    """How many prompts to take. Raises DataError."""
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise DataError(f"take({n!r}): wanted a whole number of prompts, at least one")
    return int(n)


def epochs_of(on_end: str, epochs: int | None) -> int | None:
    """How many passes the two options mean, None for no end. Raises DataError where they contradict each other."""
    if on_end not in ("repeat", "stop"):
        raise DataError(f"on_end={on_end!r}: wanted 'repeat' or 'stop'")
    if on_end == "repeat":
        if epochs is not None:
            raise DataError(f"epochs={epochs} needs on_end='stop': 'repeat' has no end")
        return None
    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
        raise DataError(f"epochs={epochs!r}: wanted a whole number, at least one")
    return 1 if epochs is None else epochs


def checked_state(state: Any, kind: str, call: str) -> None:
    """Refuse what is no state of this kind, or of a newer rlbench. Raises DataError."""
    if not isinstance(state, Mapping) or state.get("kind") != kind:
        raise DataError(f"restore: wanted what {call} gave, got {str(state)[:60]}")
    if not _is_count(state.get("format")) or state["format"] > FORMAT:
        raise DataError(f"restore: the state has format {state.get('format')!r}; this rlbench reads up to {FORMAT}")


def check_same_options(stream: Any, state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a state that was taken with other options."""
    for name in names:
        if state.get(name) != (now := getattr(stream, name)):
            kind = state["kind"]
            raise DataError(
                f"restore: the state is of a {kind} with {name}={state.get(name)!r}, this one has {name}={now!r}: make "
                "it as it was, or start anew"
            )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
