"""`rb.data.mix`: several sets as one stream, in fixed shares.

Which set comes next is not drawn: it is the one furthest behind its share. So every batch has the shares to within a
prompt or so, at any length, where random draws would wander by the square root of it.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from rlbench.data.prompts.prompt import Prompt
from rlbench.data.prompts.set import PromptSet
from rlbench.data.prompts.stream import FORMAT, OnEnd, PromptStream, check_count, check_state, checked_seed
from rlbench.errors import DataError, Suggesting
from rlbench.units import format_percent

SOURCE, SOURCE_OF_ROW = "source", "row_source"


def mix(
    sets: Mapping[str, Any] | Sequence[Any],
    weights: Mapping[str, float] | Sequence[float] | None = None,
    *,
    seed: int = 0,
    shuffle: bool = True,
    on_end: OnEnd = "repeat",
    epochs: int | None = None,
) -> Mixture:
    """Several sets of prompts as one stream.

        mixture = rb.data.mix({"gsm": (gsm, 0.7), "code": (code, 0.3)}, seed=0)
        prompts = mixture.take(64)          # 45 and 19; each prompt's meta["source"] says of which set it is

    Args:
        sets: name -> a set, or (set, weight); or a list of sets, which go by their own names. A set is a `PromptSet`
            or a list of prompts.
        weights: by name or in the order of the sets, where they do not stand beside them; they need not sum to one.
            None, where no set brings its own: in proportion to the sets' sizes.
        seed: of the order within each set.
        shuffle: a new order in each epoch of a set; False keeps the sets' own.
        on_end: "repeat" starts a set anew when it is through; "stop" ends the mixture when the next set in turn has
            none left, as going on without it would break the shares.
        epochs: passes over a set before it has none left; one where `on_end="stop"` says no more.
    """
    if not isinstance(sets, Mapping | Sequence) or isinstance(sets, str | PromptSet) or not sets:
        raise DataError("mix: give several sets: {'name': (set, weight), …} or [set, set]")
    given = list(sets.items()) if isinstance(sets, Mapping) else [("", one) for one in sets]
    if weights is not None and len(weights) != len(given):
        raise DataError(f"mix: {len(weights)} weights for {len(given)} sets")
    named: dict[str, PromptSet] = {}
    shares: dict[str, Any] = {}
    for i, (name, one) in enumerate(given):
        weight = None
        if isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], int | float):
            if weights is not None:
                raise DataError("mix: weights stand beside the sets and in weights=: give them once")
            one, weight = one
        prompts = PromptSet.of(one)
        name = str(name) or prompts.name or f"set{i}"
        if weights is not None:
            weight = weights.get(name) if isinstance(weights, Mapping) else weights[i]
        if name in named or not len(prompts):
            raise DataError(f"mix: {name!r} is empty, or the name of two sets: give {{'name': set, …}}")
        named[name], shares[name] = replace(prompts, name=name), weight
    if all(weight is None for weight in shares.values()):
        shares = {name: len(one) for name, one in named.items()}
    for name, weight in shares.items():
        if not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise DataError(f"mix: the weight of {name!r} is {weight!r}: give every set a number above zero, or none")
    total, seed = math.fsum(shares.values()), checked_seed(seed)
    streams = {
        name: one.stream(zlib.crc32(f"{seed}/{name}".encode()), shuffle, on_end, epochs) for name, one in named.items()
    }
    return Mixture(streams, {name: weight / total for name, weight in shares.items()}, seed)


class Mixture(Suggesting):
    """Takes prompts from several `streams`, by name, in fixed shares. Made by `rlbench.data.mix`.

    `weights`: each set's share, summing to one. `counts`: prompts taken of each. `take` moves it forward, `restore`
    puts it elsewhere.
    """

    def __init__(self, streams: Mapping[str, PromptStream], weights: Mapping[str, float], seed: int) -> None:
        self.streams = dict(streams)
        self.weights = dict(weights)
        self.seed = seed

    @property
    def counts(self) -> dict[str, int]:
        """Prompts taken so far, by set."""
        return {name: stream.taken for name, stream in self.streams.items()}

    @property
    def taken(self) -> int:
        """Prompts taken so far, in all."""
        return sum(self.counts.values())

    @property
    def ended(self) -> bool:
        """Whether nothing is left to take: the set whose turn it is has none."""
        return self.streams[self._next()].ended

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts; fewer, or none, where the mixture stops.

        Each one's `meta["source"]` is the name of its set; a row's own "source" is kept as "row_source".
        """
        check_count(n)
        taken: list[Prompt] = []
        while len(taken) < n and not self.ended:
            name = self._next()
            (prompt,) = self.streams[name].take(1)
            meta = dict(prompt.meta)
            if meta.get(SOURCE, name) != name:
                meta[SOURCE_OF_ROW] = meta[SOURCE]
            taken.append(replace(prompt, meta={**meta, SOURCE: name}))
        return taken

    def batches(self, n: int) -> Iterator[list[Prompt]]:
        """Yield `take(n)` until it ends; the last one may be shorter."""
        while prompts := self.take(n):
            yield prompts

    def copy(self) -> Self:
        """Another mixture of the same sets, at the same place; each goes on by itself."""
        other = copy.copy(self)
        other.streams = {name: stream.copy() for name, stream in self.streams.items()}
        return other

    def state(self) -> dict[str, Any]:
        """Where it stands, as plain JSON of a fixed small size; `restore` takes it, in any process."""
        return {
            "format": FORMAT,
            "kind": "mixture",
            "seed": self.seed,
            "weights": dict(self.weights),
            "streams": {name: stream.state() for name, stream in self.streams.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> Self:
        """Go to where `state` was taken, and return the mixture.

        DataError for what is no state of a mixture, or of other sets, weights or options; nothing has moved then.
        """
        check_state(state, self.state(), ("streams",), "")
        places = {name: stream.place_of(state["streams"].get(name)) for name, stream in self.streams.items()}
        for name, place in places.items():
            self.streams[name].go_to(place)
        return self

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{name} {format_percent(self.weights[name])} of {len(stream.prompts)} (epoch {stream.epoch + 1})"
            for name, stream in self.streams.items()
        )
        return f"Mixture({shares} · {self.taken} taken · seed {self.seed})"

    def _next(self) -> str:
        """The set furthest behind its share once one more prompt is taken; of equals the first."""
        counts = self.counts
        taken = sum(counts.values()) + 1
        return max(self.streams, key=lambda name: self.weights[name] * taken - counts[name])
