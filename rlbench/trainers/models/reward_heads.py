"""Reward models on the ranks: one score for each sequence, at its last token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlbench.errors import DataError, EngineError
from rlbench.strategies.base import StrategyBase
from rlbench.trainers.models.scalar_model import HEAD, ScalarHeadModel, make_scalar
from rlbench.trainers.passes.forward import evaluating
from rlbench.user_code import user_code


class RewardModel(ScalarHeadModel):
    """A frozen scorer; `make_reward_model` makes one. `model(input_ids, …)` gives the score after each token."""


def make_reward_model(
    path: str,
    *,
    dtype: str | torch.dtype | None = None,
    value_head_prefix: str = HEAD,
    seed: int | None = None,
    revision: str | None = None,
) -> Any:
    """Make a frozen reward model on meta; `strategy.prepare_model(model)` shards it and loads its weights.

    `path` is a folder or hub id of a sequence classification model with one label, or of any causal checkpoint with
    such a head, called `value_head_prefix` there. `seed` draws a head that the checkpoint lacks, to train it; None
    refuses that.
    """
    model = make_scalar(RewardModel, path, dtype, value_head_prefix, seed, revision)
    model.requires_grad_(False)
    return model


@torch.no_grad()
def scores_of(
    model: nn.Module, sequences: Sequence[Sequence[int]], strategy: StrategyBase, batch_size: int = 8
) -> Tensor:
    """The score of each sequence at its last token; collective, whatever number of sequences each rank has.

    Args:
        model: a `RewardModel`, a sequence classification model of transformers (whatever its padding token), or any
            module with `model(input_ids, attention_mask=…)` for rows padded on the right, which gives (B,), (B, 1), or
            something with `.logits` of that shape; prepared by the strategy.
        sequences: token ids of prompt and response, of this rank.
        strategy: the rank's.
        batch_size: sequences of one forward.

    Returns:
        (B,) float32 on the host, in the order of `sequences`.
    """
    control = strategy.control
    control.together("checking the sequences to score", lambda: _check(model, sequences, batch_size))
    by_length = sorted(range(len(sequences)), key=lambda row: (-len(sequences[row]), row))
    batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    scores = torch.zeros(len(sequences))
    with evaluating(model), user_code():
        for step in range(max(control.gather(len(batches)))):
            rows = batches[step] if step < len(batches) else []
            found = _scored(model, [sequences[row] for row in rows] or [[0]], strategy.device.device)
            scores[rows] = found[: len(rows)]
    return scores


def _check(model: nn.Module, sequences: Sequence[Sequence[int]], batch_size: int) -> None:
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size}: it is a number of sequences, at least 1.")
    empty = [row for row, ids in enumerate(sequences) if len(ids) == 0]
    if empty:
        raise DataError(f"sequence {empty[0]} has no token; a score is that of the last one.")
    config: Any = getattr(model, "config", None)
    size = getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "vocab_size", None)
    for row, ids in enumerate(sequences):
        if size is not None and not (0 <= min(ids) and max(ids) < size):
            raise DataError(
                f"sequence {row} holds token ids from {min(ids)} to {max(ids)}, the reward model's vocabulary has "
                f"{size}; decode the text and tokenise it with the reward model's own tokenizer."
            )


def _scored(model: nn.Module, sequences: list[Sequence[int]], device: torch.device) -> Tensor:
    """One forward; (B,) float32 on the host."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    ends = {int(ids[-1]) for ids in sequences}
    unused = next(token for token in range(len(ends) + 1) if token not in ends)  # padding: never taken for a last token
    ids = torch.full((len(sequences), int(lengths.max())), unused)
    held = torch.arange(ids.shape[1])[None] < lengths[:, None]
    ids[held] = torch.tensor([token for row in sequences for token in row])
    ids, mask = ids.to(device), held.long().to(device)
    if isinstance(model, ScalarHeadModel):
        last = torch.arange(len(ids)) * ids.shape[1] + lengths - 1
        places = torch.arange(ids.shape[1]).expand(ids.shape).to(device)
        given: Any = model(ids, attention_mask=mask, position_ids=places, positions=last.to(device))
    else:
        with _pooling_behind(model, unused):
            given = model(ids, attention_mask=mask)
    found = getattr(given, "logits", given)
    if not isinstance(found, Tensor) or found.shape not in ((len(ids),), (len(ids), 1)):
        seen = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise EngineError(
            f"{type(model).__name__} gave {seen} for {len(ids)} sequences; a reward model gives one number for each: "
            f"({len(ids)},), ({len(ids)}, 1), or an output with .logits of that shape."
        )
    return found.reshape(-1).float().cpu()


@contextmanager
def _pooling_behind(model: nn.Module, padding: int) -> Iterator[None]:
    """Let a model of transformers find each last token: it takes the last that is not its padding token."""
    from transformers import PreTrainedModel

    config: Any = model.config.get_text_config() if isinstance(model, PreTrainedModel) else None
    if config is None:
        yield
        return
    before = config.pad_token_id
    config.pad_token_id = padding
    try:
        yield
    finally:
        config.pad_token_id = before
