"""Rows of tokens as a sequence classifier of transformers is given them, so that it reads each at its last token.

Such a model looks for a row's last token by value: the last that is not its configuration's padding token. Where that
is the end token as well, or stands at a row's end, it reads one too early; so the padding is chosen by the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def padding_for(rows: Sequence[Sequence[int]], preferred: int | None = None) -> int:
    """Return a token that ends none of the rows: the `preferred` one where that may be."""
    ends = {int(row[-1]) for row in rows}
    if preferred is not None and preferred not in ends:
        return preferred
    return next(token for token in range(len(ends) + 1) if token not in ends)


def padded(rows: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Return token ids (B, T) int64, padded on the right, and the mask (B, T) int64: 1 where a token is the row's."""
    import torch

    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), padding)
    held = torch.arange(ids.shape[1])[None] < lengths[:, None]
    ids[held] = torch.tensor([int(token) for row in rows for token in row])
    return ids, held.long()


def padding_token(model: Any) -> int | None:
    """Return what a model of transformers takes for padding; None for nothing, and of any other module."""
    from transformers import PreTrainedModel

    return model.config.get_text_config().pad_token_id if isinstance(model, PreTrainedModel) else None


@contextmanager
def padding_is(model: Any, padding: int) -> Iterator[None]:
    """Have a model of transformers take `padding` for its padding token while this lasts; another module is let be."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        yield
        return
    config: Any = model.config.get_text_config()
    before, config.pad_token_id = config.pad_token_id, padding
    try:
        yield
    finally:
        config.pad_token_id = before
