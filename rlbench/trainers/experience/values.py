"""What a rank learnt from its samples: the value that goes from the experience maker to the update, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.data.batches.batch import TrainBatch
from rlbench.data.joining import join_batches
from rlbench.data.prompts.prompt import Prompt
from rlbench.errors import DataError
from rlbench.trainers.passes.packing import pad_rows

PER_TOKEN = ("token_rewards", "kl", "values", "returns", "entropy")
PER_ROW = ("prompts", "texts")


@dataclass(frozen=True, eq=False)
class Experience:
    """B sequences of one rank; a value: every change gives a new one. Flat arrays are float32 beside the response
    tokens.

    Attributes:
        batch: tokens, mask, final advantages, sampler, old and reference log-probs, group (a number that no other
            prompt of the run has), and each sequence's score (`rewards`, before shaping; NaN where it trains nothing).
        token_rewards: flat; the shaped reward with its KL penalty, from which the returns were taken.
        kl: flat; the estimate between actor and reference.
        values, returns: flat; the critic's when the experience was made, and what it is to predict.
        entropy: flat; the actor's, in nats.
        info: (B,) float64 numbers by name: `reward` (after shaping; NaN where it trains nothing), `return`, `kl`, …
        components: (B,) float64: what the scores were made of, by name; NaN where one does not apply.
    """

    batch: TrainBatch
    prompts: tuple[Prompt, ...]
    texts: tuple[str, ...]
    token_rewards: np.ndarray
    kl: np.ndarray | None = None
    values: np.ndarray | None = None
    returns: np.ndarray | None = None
    entropy: np.ndarray | None = None
    info: Mapping[str, np.ndarray] = field(default_factory=dict)
    components: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in PER_TOKEN:
            value = getattr(self, name)
            if value is not None and value.shape != self.batch.responses.values.shape:
                raise DataError(f"{name} has shape {value.shape} for {self.batch.tokens} response tokens")
        for name, rows in [*((n, getattr(self, n)) for n in PER_ROW), *self.info.items(), *self.components.items()]:
            if len(rows) != len(self):
                raise DataError(f"{name} has {len(rows)} entries for {len(self)} sequences")

    def __len__(self) -> int:
        return len(self.batch)

    def __repr__(self) -> str:
        return f"Experience({len(self)} sequences, {self.batch.tokens} response tokens)"

    def rows(self, indices: Sequence[int] | np.ndarray) -> Experience:
        """Return the given sequences, in the given order."""
        rows = np.asarray(indices, np.int64)
        flat: dict[str, Any] = {name: self.batch.responses.pick(getattr(self, name), rows) for name in PER_TOKEN}
        return replace(
            self,
            batch=self.batch.rows(rows),
            **flat,
            prompts=tuple(self.prompts[i] for i in rows),
            texts=tuple(self.texts[i] for i in rows),
            info={name: values[rows] for name, values in self.info.items()},
            components={name: values[rows] for name, values in self.components.items()},
        )

    @classmethod
    def joined(cls, parts: Sequence[Experience]) -> Experience:
        """Return the sequences of all parts, one after the other; group numbers stay as they are.

        A number that a part lacks is NaN there: its samples were all cut, or its rewards told of others.
        """
        if not parts:
            raise DataError("there is no experience to join")
        if len(parts) == 1:
            return parts[0]
        flat: dict[str, Any] = {}
        for name in PER_TOKEN:
            columns = [getattr(part, name) for part in parts]
            absent = [i for i, column in enumerate(columns) if column is None]
            if 0 < len(absent) < len(parts):
                raise DataError(f"joining experience: part {absent[0]} has no {name}, others have")
            flat[name] = None if absent else np.concatenate(columns)
        for mapping in ("info", "components"):
            names = dict.fromkeys(name for part in parts for name in getattr(part, mapping))
            flat[mapping] = {
                name: np.concatenate([getattr(part, mapping).get(name, np.full(len(part), np.nan)) for part in parts])
                for name in names
            }
        return cls(
            batch=join_batches([part.batch for part in parts], renumber=False),
            prompts=tuple(prompt for part in parts for prompt in part.prompts),
            texts=tuple(text for part in parts for text in part.texts),
            **flat,
        )

    @property
    def trained(self) -> np.ndarray:
        """(B,) bool: which sequences have a trained token; one that an interrupt cut has none."""
        return np.diff(offsets_of(self.batch.mask)[self.batch.responses.offsets]) > 0

    def padded(self, flat: np.ndarray) -> Tensor:
        """Return flat numbers beside the response tokens as (B, T) float32, 0 behind each response."""
        return pad_rows(self.batch.responses.with_values(flat))

    # -- padded views, by the reference system's names

    @property
    def action_mask(self) -> Tensor:
        """(B, T) bool: which response tokens are trained; T is the longest response."""
        return self.padded(self.batch.mask) > 0

    @property
    def action_log_probs(self) -> Tensor:
        """(B, T) float32: the actor's when the experience was made."""
        old = self.batch.old_logprobs
        return self.padded(self.batch.sampler_logprobs if old is None else old)

    @property
    def base_action_log_probs(self) -> Tensor | None:
        """(B, T) float32: the reference's."""
        return None if self.batch.ref_logprobs is None else self.padded(self.batch.ref_logprobs)

    @property
    def advantages(self) -> Tensor:
        """(B, T) float32."""
        return self.padded(self.batch.advantages)

    @property
    def sequences(self) -> Tensor:
        """(B, P + T) int64: prompts padded on the left, responses on the right, with 0."""
        return torch.cat([_left_padded(self.batch.prompts), self.padded(self.batch.responses.values).long()], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """(B, P + T) int64: 1 for tokens, 0 for padding."""
        ones = [rows.with_values(np.ones(len(rows.values))) for rows in (self.batch.prompts, self.batch.responses)]
        return torch.cat([_left_padded(ones[0]), pad_rows(ones[1]).long()], dim=1)

    @property
    def labels(self) -> list[Any]:
        """The reference answer of each sequence's prompt."""
        return [prompt.label for prompt in self.prompts]


def _left_padded(rows: Ragged) -> Tensor:
    padded = torch.zeros(len(rows), max(1, int(rows.lengths.max())), dtype=torch.int64)
    padded[torch.arange(padded.shape[1])[None] >= padded.shape[1] - torch.from_numpy(rows.lengths)[:, None]] = (
        torch.from_numpy(np.asarray(rows.values, np.int64))
    )
    return padded
