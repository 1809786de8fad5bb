"""A set of prompts as a value: cut, filtered, shuffled and split into new sets; a stream walks over it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import numpy as np

from rlbench.data.base import plain
from rlbench.data.base.column import Column
from rlbench.data.base.ragged import chosen_rows
from rlbench.data.prompts.lengths import LongPrompt
from rlbench.data.prompts.prompt import Prompt, as_prompts
from rlbench.data.prompts.stream import OnEnd, PromptStream, permutation
from rlbench.errors import DataError, Suggesting


@dataclass(frozen=True, eq=False)
class PromptSet(Suggesting, Sequence[Prompt]):
    """P prompts; what `rlbench.data.load` gives, and whatever takes prompts takes it.

    `name`: of the set in a mixture. `lengths` (P,) int64: tokens of each, None where no tokenizer was given.
    `too_long`: what was longer than `max_prompt_tokens` when its source was loaded, whether kept or not.
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

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int] | np.ndarray) -> PromptSet: ...

    def __getitem__(self, index: int | slice | Sequence[int] | np.ndarray) -> Prompt | PromptSet:
        """An integer gives a `Prompt`; a slice, a (P,) boolean mask or a list of rows gives a set."""
        if isinstance(index, int | np.integer):
            return self.prompts[index]
        return self._rows(np.arange(len(self))[index])

    def select(self, keep: np.ndarray | Sequence[int] | Callable[[Prompt], Any]) -> PromptSet:
        """The prompts for which `keep` holds: (P,) booleans, a function of a `Prompt`, or their numbers."""
        return self._rows(chosen_rows(keep, len(self), lambda: self.prompts))

    filter = select

    def shuffle(self, seed: int = 0) -> PromptSet:
        """The same prompts in an order that `seed` fixes, on every machine."""
        return self._rows(permutation(len(self), seed))

    def split(self, share: float, seed: int | None = None) -> tuple[PromptSet, PromptSet]:
        """Two sets without a prompt in common, the first with this share of all; drawn by `seed`, else cut in order."""
        if not 0 < share < 1 or len(self) < 2:
            raise DataError(f"split({share}) of {len(self)} prompts: wanted a share between 0 and 1, and two prompts")
        whole = self if seed is None else self.shuffle(seed)
        cut = min(max(round(share * len(self)), 1), len(self) - 1)
        return whole[:cut], whole[cut:]

    def stream(
        self, seed: int = 0, shuffle: bool = True, on_end: OnEnd = "repeat", epochs: int | None = None
    ) -> PromptStream:
        """Walk over the set, epoch by epoch, in an order that `seed` fixes, or the set's own; see `PromptStream`.

        `on_end`: after so many `epochs` (one) "stop", or "repeat" for ever.
        """
        return PromptStream(self, seed, shuffle, on_end, epochs)

    @property
    def labels(self) -> list[Any]:
        """The reference answer of each prompt."""
        return [prompt.label for prompt in self.prompts]

    @cached_property
    def fingerprint(self) -> str:
        """Identity of prompts, media and labels, in their order: what the place of a stream belongs to."""
        digest = hashlib.sha256()
        for i, prompt in enumerate(self.prompts):
            what = f"prompt {i} of {self.name or 'the set'}"
            seen = [one.digest for one in prompt.media]
            told = [prompt.content, prompt.label, *([seen] if seen else [])]
            digest.update(plain.dumps(told, what).encode() + b"\n")
        return digest.hexdigest()[:16]

    def __add__(self, other: PromptSet) -> PromptSet:
        """Both, one after the other; see `rlbench.data.join`."""
        from rlbench.data.joining import join

        return join(self, other) if isinstance(other, PromptSet) else NotImplemented

    def __repr__(self) -> str:
        labelled = sum(prompt.label is not None for prompt in self.prompts)
        parts = [f"{len(self)} prompts", "" if labelled == len(self) else f"{labelled} with a label"]
        if self.lengths is not None and len(self):
            parts.append(f"{self.lengths.min()} to {self.lengths.max()} tokens, median {np.median(self.lengths):.0f}")
        if self.too_long:
            parts.append(f"{len(self.too_long)} too long for {self.max_prompt_tokens} tokens: .too_long")
        name = f"{self.name!r}: " if self.name else ""
        return f"PromptSet({name}{' · '.join(filter(None, parts))})"

    def _rows(self, rows: np.ndarray) -> PromptSet:
        lengths = None if self.lengths is None else np.asarray(self.lengths)[rows]
        return replace(self, prompts=tuple(self.prompts[i] for i in rows.tolist()), lengths=lengths)
