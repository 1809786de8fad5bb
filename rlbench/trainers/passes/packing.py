"""How a model and a loss see the rows of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rlbench.data.base.ragged import Ragged, flat_index, offsets_of
from rlbench.data.base.routing import UNKNOWN
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import DataError
from rlbench.trainers.passes.balancing import Balance, rows_of
from rlbench.trainers.passes.prefixes import OWN, padded_places, places_of
from rlbench.trainers.passes.routing import Routing

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Grid:
    """Where flat values (R, …) beside ragged rows sit in a padded (rows, longest) view."""

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, ragged: Ragged, device: torch.device = CPU) -> Grid:
        """Lay out ragged rows."""
        lengths = ragged.lengths
        rows, columns = np.repeat(np.arange(len(lengths)), lengths), _spread(np.zeros_like(lengths), lengths)
        shape = len(lengths), max(1, int(lengths.max(initial=0)))
        return cls(_to(rows, device), _to(columns, device), shape)

    def pad(self, flat: Tensor) -> Tensor:
        """Pad flat values (R, …) with 0; differentiable."""
        return flat.new_zeros((*self.shape, *flat.shape[1:])).index_put((self.rows, self.columns), flat)

    def pad_numbers(self, flat: np.ndarray) -> Tensor:
        """Pad flat numbers of the host with 0; float32, on the grid's device."""
        return self.pad(torch.from_numpy(np.array(flat, np.float32)).to(self.rows.device))

    def flat(self, padded: Tensor) -> Tensor:
        """Take padded values back to flat ones."""
        return padded[self.rows, self.columns]


def pad_rows(rows: Ragged) -> Tensor:
    """Pad ragged rows to (rows, longest) float32, zeros behind each."""
    return Grid.of(rows).pad_numbers(rows.values)


@dataclass(frozen=True)
class ModelInputs:
    """One micro-batch for the model, laid out as (1, total) packed, or (S, longest) padded.

    `lengths`: tokens of each row, where packed of each segment of the one row; `after`: of `Places`, where prompts are
    shared, else None. `predictors` (R,): flat positions in `input_ids` whose logits predict the response tokens, which
    are `targets` (R,); `grid`: their place in a loss's view. `attention_mask` is None where packed.
    `media`: what else a model takes that sees or hears; where it sees, `position_ids` have three dimensions in front;
    `placeholders`: as `input_ids`, which of its placeholder tokens are images or sounds (1), or videos (2), None: all.
    `routing`: the experts that the sampler chose for each of the flat `input_ids`, where the rows have any. `balance`:
    what routers say of how evenly they spread each row's tokens, where that is asked for.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    lengths: list[int]
    predictors: Tensor
    targets: Tensor
    grid: Grid
    media: Mapping[str, Tensor] = field(default_factory=dict)
    placeholders: Tensor | None = None
    routing: Routing | None = None
    balance: Balance | None = None
    after: list[int] | None = None

    def weighed(self) -> ModelInputs:
        """Return the layout with room for what routers say (`balanced`)."""
        shape = self.input_ids.shape[0], self.input_ids.shape[1]
        row_of = rows_of(self.lengths, shape, self.input_ids.device)
        return replace(self, balance=Balance(row_of, len(self.lengths)))


def model_inputs(batch: TrainBatch, device: torch.device, packed: bool, share_prompts: bool = False) -> ModelInputs:
    """Lay out the rows of `batch` as one row without padding, each prompt once where they share it, or as
    padded rows."""
    prompt, response = batch.prompts.lengths, batch.responses.lengths
    if (prompt < 1).any():
        raise DataError(f"sequence {int((prompt < 1).argmax())} has an empty prompt; give it at least one token.")
    width = int((prompt + response).max())
    places = places_of(batch, share_prompts) if packed else padded_places(batch, width)
    ids, positions = np.zeros(places.size, np.int64), np.resize(np.arange(width), places.size)
    prompt_at, response_at = _spread(places.prompts, prompt), _spread(places.responses, response)
    ids[prompt_at], ids[response_at] = batch.prompts.values, batch.responses.values
    positions[prompt_at], positions[response_at] = _spread(np.zeros_like(prompt), prompt), _spread(prompt, response)
    predictors = response_at - 1
    predictors[batch.responses.offsets[:-1][response > 0]] = (places.prompts + prompt - 1)[response > 0]
    held = (np.arange(width)[None] < (prompt + response)[:, None]).astype(np.int64)
    shape = (1, places.size) if packed else held.shape
    return ModelInputs(
        input_ids=_to(ids.reshape(shape), device),
        position_ids=_to(positions.reshape(shape), device),
        attention_mask=None if packed else _to(held, device),
        lengths=places.lengths,
        predictors=_to(predictors, device),
        targets=_to(batch.responses.values, device),
        grid=Grid.of(batch.responses, device),
        routing=None if batch.routing is None else _routing(batch.routing, places.prompts, places.size, device),
        after=places.after if any(number != OWN for number in places.after) else None,
    )


def _routing(rows: Ragged, starts: np.ndarray, size: int, device: torch.device) -> Routing:
    """Lay out experts beside `size` flat tokens, of which each row begins where `starts` says."""
    experts = np.full((size, *rows.values.shape[1:]), UNKNOWN, np.int16)
    experts[_spread(starts, rows.lengths)] = rows.values
    return Routing(torch.from_numpy(experts).to(device))


def _spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Positions start, start+1, … of each row, joined."""
    offsets = offsets_of(lengths)
    within = flat_index(offsets, np.arange(len(lengths))) - np.repeat(offsets[:-1], lengths)
    return np.repeat(starts, lengths) + within


def _to(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)
