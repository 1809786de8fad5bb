"""What verbs return where a few facts are all there is to say: frozen values, read as attributes or by name.

A module that all rooms may import; `rlbench.notebook.cards.result_views` draws them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbench.errors import Suggesting, nearest
from rlbench.units import format_bytes


class Result(Suggesting, Mapping[str, Any]):
    """Base of frozen dataclasses that can also be read like the dict they would else have been."""

    def named(self) -> dict[str, Any]:
        """What can be asked for by name: the fields."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Any:
        values = self.named()
        if name not in values:
            raise KeyError(f"{name}{nearest(name, values)}; there are {', '.join(values)}")
        return values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """What is called so, else the default; a name that is not there is no mistake here, and looked up at once."""
        return self.named().get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self.named()

    def __iter__(self) -> Iterator[str]:
        return iter(self.named())

    def __len__(self) -> int:
        return len(self.named())


@dataclass(frozen=True)
class Done(Result):
    """A verb that changes something and measures nothing: what is so now, and what to do about it."""

    now: str
    mend: str = ""

    def __repr__(self) -> str:
        return " · ".join(filter(None, (self.now, self.mend)))


class Names(list[str]):
    """A list of names, and what happened to them."""

    def __init__(self, what: str, names: Iterable[str]) -> None:
        super().__init__(names)
        self.what = what

    def __repr__(self) -> str:
        return f"{self.what}: {', '.join(self) or 'nothing'}"

    def __reduce__(self) -> Any:
        return Names, (self.what, list(self))


@dataclass(frozen=True)
class ExportedModel(Result):
    """A model written as a Hugging Face folder: where, its size, its files; `scores`: a reward model, no policy."""

    path: str
    bytes: int
    files: tuple[str, ...]
    scores: bool = False

    def __repr__(self) -> str:
        return f"ExportedModel({self.path!r}, {format_bytes(self.bytes)}, {len(self.files)} files)"


@dataclass(frozen=True)
class Saved(Result):
    """A checkpoint that was written: where, its size, the older ones that made way."""

    path: str
    bytes: int
    removed: tuple[str, ...]

    def __repr__(self) -> str:
        gone = f", removed {', '.join(Path(p).name for p in self.removed)}" if self.removed else ""
        return f"Saved({self.path!r}, {format_bytes(self.bytes)}{gone})"


@dataclass(frozen=True)
class Resized(Result):
    """A session of another size: how many training ranks and replicas there are now, and where it stands."""

    train: int
    inference: int
    step: int
    version: int

    def __repr__(self) -> str:
        return f"{self.train} training ranks, {self.inference} replicas; at step {self.step}, v{self.version}"


@dataclass(frozen=True)
class Parked(Result):
    """A session that was written to disk and ended: where, its size, what could not be kept, and which parked ones went
    for their age."""

    name: str
    path: str
    bytes: int
    lost: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __repr__(self) -> str:
        facts = [
            f"{self.name} is parked: {format_bytes(self.bytes)} on disk",
            f"rb.attach({self.name!r}) brings it back",
        ]
        facts += [f"not kept: {'; '.join(self.lost)}"] if self.lost else []
        facts += [f"forgotten for their age: {', '.join(self.removed)}"] if self.removed else []
        return " · ".join(facts)
