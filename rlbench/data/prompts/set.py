"""A set of prompts as a value: cut, filtered, shuffled and split into new sets; a stream walks over it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np

from rlbench.data.base import plain
from rlbench.data.base.column import Column
from rlbench.data.prompts.lengths import LongPrompt
from rlbench.data.prompts.prompt import Prompt, PromptContent, as_prompts
from rlbench.data.prompts.stream import OnEnd, PromptStream, permutation
from rlbench.errors import DataError, Suggesting


@dataclass(frozen=True, eq=False)
class PromptSet(Suggesting, Sequence[Prompt]):
    """P prompts; what `rlbench.data.load` gives, and whatever takes prompts takes it.

    `lengths` (P,) int64: tokens of each, None where no tokenizer was given. `too_long`: what was longer than
    `max_prompt_tokens` when its source was loaded, whether kept or not. `name` says which set a prompt is of in a
    mixture.
    """

    prompts: tuple[Prompt, ...]
    name: str = ""
    lengths: np.ndarray | None = None
    max_prompt_tokens: int | None = None
    too_long: tuple[LongPrompt, ...] = ()

    def __post_init__(self) -> None:
        if self.lengths is None:
            return
        if np.shape(self.lengths) != (len(self.prompts),):
            raise DataError(f"lengths have shape {np.shape(self.lengths)} for {len(self.prompts)} prompts")
        object.__setattr__(self, "lengths", Column.of(self.lengths, "prompt lengths", "tokens"))

    @classmethod
    def of(cls, prompts: Any, name: str = "") -> PromptSet:
        """A set of what `as_prompts` accepts; a set comes back as it is, under `name` where one is given."""
        if isinstance(prompts, PromptSet):
            return replace(prompts, name=name) if name else prompts
        return cls(tuple(as_prompts(prompts)), name)

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int] | np.ndarray) -> PromptSet: ...

    def __getitem__(self, index: int | slice | Sequence[int] | np.ndarray) -> Prompt | PromptSet:
        """An integer gives a `Prompt`; a slice, a (P,) boolean mask or a list of rows gives a set."""
        if isinstance(index, int | np.integer):
            return self.prompts[index]
        return self._rows(np.arange(len(self))[index])

    def filter(self, keep: Callable[[Prompt], Any]) -> PromptSet:
        """The prompts for which `keep` holds."""
        return self._rows(np.flatnonzero([bool(keep(prompt)) for prompt in self.prompts]))

    def head(self, n: int = 5) -> PromptSet:
        """The first `n` prompts."""
        return self[: max(n, 0)]

    def shuffle(self, seed: int = 0) -> PromptSet:
        """The same prompts in an order that `seed` fixes, on every machine."""
        return self._rows(permutation(len(self), seed))

    def split(self, share: float, seed: int | None = None) -> tuple[PromptSet, PromptSet]:
        """Two sets without a prompt in common.

        Args:
            share: of the first set, between 0 and 1; each set gets at least one prompt.
            seed: draws them at random; None cuts in order.
        """
        if not 0 < share < 1:
            raise DataError(f"split({share}): the share of the first set lies between 0 and 1")
        if len(self) < 2:
            raise DataError(f"split: a set of {len(self)} prompts cannot be split")
        whole = self if seed is None else self.shuffle(seed)
        cut = min(max(round(share * len(self)), 1), len(self) - 1)
        return whole[:cut], whole[cut:]

    def stream(
        self, seed: int = 0, shuffle: bool = True, on_end: OnEnd = "repeat", epochs: int | None = None
    ) -> PromptStream:
        """Walk over the set, epoch by epoch; see `PromptStream`.

        Args:
            seed: of the order.
            shuffle: a new order in each epoch; False keeps the set's.
            on_end: after the last epoch "stop", or "repeat" for ever.
            epochs: how many passes before it stops; one where `on_end="stop"` says no more.
        """
        return PromptStream(self, seed, shuffle, on_end, epochs)

    @property
    def labels(self) -> list[Any]:
        """The reference answer of each prompt."""
        return [prompt.label for prompt in self.prompts]

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the prompts and labels, in their order: what the place of a stream belongs to."""
        digest = hashlib.sha256()
        for i, prompt in enumerate(self.prompts):
            what = f"prompt {i} of {self.name or 'the set'}"
            digest.update(plain.dumps([prompt.content, prompt.label], what).encode() + b"\n")
        return digest.hexdigest()[:16]

    def join(self, *others: PromptSet) -> PromptSet:
        """This set, then the others; see `rlbench.data.join`."""
        from rlbench.data.joining import join

        return join(self, *others)

    def __add__(self, other: PromptSet) -> PromptSet:
        return self.join(other) if isinstance(other, PromptSet) else NotImplemented

    def __repr__(self) -> str:
        kinds = {_kind(prompt.content) for prompt in self.prompts}
        parts = [f"{len(self)} prompts", "" if kinds == {"texts"} else " and ".join(sorted(kinds))]
        labelled = sum(label is not None for label in self.labels)
        parts += [] if labelled == len(self) else ["no labels" if not labelled else f"{labelled} with a label"]
        if self.lengths is not None and len(self):
            parts.append(f"{self.lengths.min()} to {self.lengths.max()} tokens, median {np.median(self.lengths):.0f}")
        if self.too_long:
            limit = "" if self.max_prompt_tokens is None else f" for {self.max_prompt_tokens} tokens"
            parts.append(f"{len(self.too_long)} too long{limit}: .too_long")
        name = f"{self.name!r}: " if self.name else ""
        return f"PromptSet({name}{' · '.join(part for part in parts if part)})"

    def _rows(self, rows: np.ndarray) -> PromptSet:
        lengths = None if self.lengths is None else np.asarray(self.lengths)[rows]
        return replace(self, prompts=tuple(self.prompts[i] for i in rows.tolist()), lengths=lengths)


def _kind(content: PromptContent) -> Literal["texts", "chats", "token ids"]:
    if isinstance(content, str):
        return "texts"
    return "chats" if isinstance(content[0], Mapping) else "token ids"
