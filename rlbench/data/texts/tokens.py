"""Tokens of one's own, as a batch: `rb.data.datum`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.batch import TrainBatch, of_texts
from rlbench.errors import DataError


def datum(
    tokens: Sequence[int] | Sequence[Sequence[int]],
    mask: Any = None,
    advantages: Any = 1.0,
    logprobs: Any = None,
    *,
    version: int | None = None,
    temperature: float = 1.0,
) -> TrainBatch:
    """Make a batch of token ids, one sequence or several; `rb.data.join(a, b, …)` makes one of many.

    Args:
        tokens: prompt and response in one list, or a list of such lists.
        mask: True for each token to train on, as long as `tokens`; None: all but the first of each sequence.
        advantages: a number, or one per token.
        logprobs: what the policy that sampled them said, one per token, what stands at untrained ones does not matter;
            None: no policy did, so that losses that weigh by them are refused.
        version: of the session's weights that sampled them; None: not known.
        temperature: at which they were sampled; the trainer divides its logits by it.
    """
    rows = _rows(tokens)
    if (rows.lengths < 2).any():
        raise DataError(f"datum: sequence {int((rows.lengths < 2).argmax())} has fewer than two tokens")
    if mask is None:
        trained = np.ones(len(rows.values), bool)
        trained[rows.offsets[:-1]] = False
    else:
        trained = _beside("mask", mask, rows).astype(bool)
    for i, own in enumerate(rows.with_values(trained)):
        if own[0] or not own.any():
            problem = "its first token, which nothing predicts" if own[0] else "none of its tokens"
            raise DataError(f"datum: the mask of sequence {i} has True for {problem}; wanted one after it")
    starts = [int(own.argmax()) for own in rows.with_values(trained)]
    index = np.concatenate([np.arange(a + s, b) for a, b, s in zip(rows.offsets, rows.offsets[1:], starts)])  # noqa: B905
    fields: dict[str, Any] = {"temperature": float(temperature)}
    fields["advantages"] = _numbers("advantages", advantages, rows)[index]
    if logprobs is not None:
        fields["sampler_logprobs"] = np.where(trained, _numbers("logprobs", logprobs, rows), 0.0)[index]
        fields["sampler_logprobs"] = fields["sampler_logprobs"].astype(np.float32)
    if version is not None:
        fields["weight_version"] = np.full(len(rows), int(version), np.int64)
    for name in ("advantages", "sampler_logprobs"):
        if name in fields and not np.isfinite(fields[name][trained[index]]).all():
            raise DataError(f"datum: {name.removeprefix('sampler_')} hold numbers that are not finite")
    return of_texts(
        [row[:start] for row, start in zip(rows, starts, strict=True)],
        [row[start:] for row, start in zip(rows, starts, strict=True)],
        [row[start:] for row, start in zip(rows.with_values(trained), starts, strict=True)],
        **fields,
    )


def _rows(tokens: Any) -> Ragged:
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if tokens and not np.ndim(tokens[0]):
        tokens = [tokens]
    if not tokens:
        raise DataError("datum: there are no tokens")
    try:
        rows = Ragged.from_rows(tokens, np.int64)
        whole = all(np.asarray(row).dtype.kind in "iu" for row in tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"datum: wanted token ids: {error}") from error
    if not whole or (rows.values < 0).any():
        raise DataError("datum: wanted token ids, whole numbers of at least 0")
    return rows.with_values(rows.values.astype(np.int32))


def _numbers(name: str, values: Any, rows: Ragged) -> np.ndarray:
    """Return one float32 per token; a number stands for all."""
    if np.ndim(values) == 0 and not isinstance(values, str):
        return np.full(len(rows.values), values, np.float32)
    return _beside(name, values, rows).astype(np.float32)


def _beside(name: str, values: Any, rows: Ragged) -> np.ndarray:
    try:
        return rows.flat(name, values)
    except DataError as error:
        said = str(error).replace("response token", "token").replace("the completions", "the tokens")
        raise DataError(f"datum: {said}") from None
