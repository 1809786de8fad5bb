"""`rb.data.mix`: several sets as one stream, in fixed shares.

Which set comes next is not drawn: it is the one furthest behind its share. So every batch has the shares to within a
prompt or so, at any length, where random draws would wander by the square root of it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from rlbench.data.prompts.prompt import Prompt
from rlbench.data.prompts.set import PromptSet
from rlbench.data.prompts.stream import FORMAT, OnEnd, check_same_options, checked_count, checked_seed, checked_state
from rlbench.errors import DataError, Suggesting, nearest
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
        weights: by name, or in the order of the sets; they need not sum to one. None, where no set brings its own: in
            proportion to the sets' sizes.
        seed: of the order within each set.
        shuffle: a new order in each epoch of a set; False keeps the sets' own.
        on_end: "repeat" starts a set anew when it is through; "stop" ends the mixture when the next set in turn has
            none left, as going on without it would break the shares.
        epochs: passes over a set before it has none left; one where `on_end="stop"` says no more.

    Returns:
        A `Mixture`.
    """
    named, own = _named(sets)
    shares = _weights(named, own, weights)
    return Mixture(named, shares, seed=seed, shuffle=shuffle, on_end=on_end, epochs=epochs)


class Mixture(Suggesting):
    """Takes prompts from several streams in fixed shares. Made by `rlbench.data.mix`.

    `sets` and their `streams`: by name. `weights`: each set's share, summing to one. `counts`: prompts taken of
    each. `take` moves it forward, `restore` puts it elsewhere.
    """

    def __init__(
        self,
        sets: Mapping[str, PromptSet],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        shuffle: bool = True,
        on_end: OnEnd = "repeat",
        epochs: int | None = None,
    ) -> None:
        total = math.fsum(weights.values())
        self.sets = dict(sets)
        self.weights = {name: weights[name] / total for name in self.sets}
        self.seed = checked_seed(seed)
        self.streams = {
            name: one.stream(zlib.crc32(f"{self.seed}/{name}".encode()), shuffle, on_end, epochs)
            for name, one in self.sets.items()
        }

    @property
    def counts(self) -> dict[str, int]:
        """Prompts taken so far, by set."""
        return {name: stream.taken for name, stream in self.streams.items()}

    @property
    def epochs(self) -> dict[str, int]:
        """Passes completed, by set."""
        return {name: stream.epoch for name, stream in self.streams.items()}

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
        checked_count(n)
        found: list[Prompt] = []
        while len(found) < n:
            name = self._next()
            taken = self.streams[name].take(1)
            if not taken:
                break
            meta = dict(taken[0].meta)
            if SOURCE in meta and meta[SOURCE] != name:
                meta[SOURCE_OF_ROW] = meta[SOURCE]
            found.append(replace(taken[0], meta={**meta, SOURCE: name}))
        return found

    def batches(self, n: int) -> Iterator[list[Prompt]]:
        """`take(n)` until it ends; the last one may be shorter."""
        while found := self.take(n):
            yield found

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

        Raises:
            DataError: the state is none of a mixture, or of other sets, weights or options; nothing has moved then.
        """
        checked_state(state, "mixture", "mixture.state()")
        streams = state.get("streams")
        if not isinstance(streams, Mapping) or set(streams) != set(self.streams):
            was = ", ".join(streams) if isinstance(streams, Mapping) else "none"
            raise DataError(f"restore: the state is of the sets {was}; this mixture has {', '.join(self.streams)}")
        check_same_options(self, state, ("weights", "seed"))
        places = {name: stream.place_of(streams[name]) for name, stream in self.streams.items()}
        for name, place in places.items():
            self.streams[name].go_to(place)
        return self

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{name} {format_percent(self.weights[name])} of {len(one)} (epoch {self.streams[name].epoch + 1})"
            for name, one in self.sets.items()
        )
        return f"Mixture({shares} · {self.taken} taken · seed {self.seed})"

    def _next(self) -> str:
        """The set furthest behind its share once one more prompt is taken; of equals the first."""
        counts, taken = self.counts, self.taken + 1
        return max(self.sets, key=lambda name: self.weights[name] * taken - counts[name])


def _named(sets: Mapping[str, Any] | Sequence[Any]) -> tuple[dict[str, PromptSet], dict[str, float]]:
    """Sets by name, and the weights that came with them."""
    if isinstance(sets, PromptSet) or not isinstance(sets, Mapping | Sequence) or isinstance(sets, str):
        raise DataError("mix: give several sets: {'name': (set, weight), …} or [set, set]")
    pairs = (
        [(str(name), given) for name, given in sets.items()] if isinstance(sets, Mapping) else [("", s) for s in sets]
    )
    if not pairs:
        raise DataError("mix: no sets: give {'name': (set, weight), …} or [set, set]")
    named: dict[str, PromptSet] = {}
    own: dict[str, float] = {}
    for i, (name, given) in enumerate(pairs):
        weighted = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], int | float)
        one = PromptSet.of(given[0] if weighted else given)
        name = name or one.name or f"set{i}"
        if name in named:
            raise DataError(f"mix: two sets are called {name!r}: give them as {{'name': set, …}}")
        if not len(one):
            raise DataError(f"mix: the set {name!r} is empty")
        named[name] = replace(one, name=name)
        if weighted:
            own[name] = given[1]
    return named, own


def _weights(
    sets: Mapping[str, PromptSet],
    own: Mapping[str, float],
    given: Mapping[str, float] | Sequence[float] | None,
) -> dict[str, float]:
    if own and given is not None:
        raise DataError("mix: weights stand beside the sets and in weights=: give them once")
    if isinstance(given, Mapping):
        found = dict(given)
    elif given is not None:
        if len(given) != len(sets):
            raise DataError(f"mix: {len(given)} weights for {len(sets)} sets")
        found = dict(zip(sets, given, strict=True))
    else:
        found = dict(own) or {name: float(len(one)) for name, one in sets.items()}
    for name in found:
        if name not in sets:
            raise DataError(f"mix: a weight for {name!r}, which is no set{nearest(name, sets)}")
    missing = [name for name in sets if name not in found]
    if missing:
        raise DataError(f"mix: no weight for {', '.join(missing)}: give every set one, or none")
    for name, weight in found.items():
        if not isinstance(weight, int | float) or not math.isfinite(weight) or weight <= 0:
            raise DataError(f"mix: the weight of {name!r} is {weight!r}: wanted a number above zero, or leave it out")
    return {name: float(weight) for name, weight in found.items()}
