"""What a loss lab works on: a batch with the log-probs of one forward, and its tokens sorted into buckets.

The seam to the engines: whoever ran the forward (the ranks of a session, a step's `metrics.tokens`) hands its per-token
arrays to `scored`, and everything after it is arithmetic in the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import TrainBatch
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.rl.types import LossInputs

LENGTH_BUCKETS = 4
ON_POLICY = 1e-5
"""Log-ratios below this are a batch's first step: every ratio is 1."""


@dataclass(frozen=True, eq=False)
class Buckets:
    """One way to sort the trained tokens: `labels`; `of_token` (tokens,) int64, the bucket of each token of the batch;
    `tokens`, the share of the trained tokens in each bucket."""

    labels: tuple[str, ...]
    of_token: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True, eq=False)
class Scored:
    """A batch with what one forward said of it: what every loss of a lab is evaluated on.

    `batch` knows old log-probs and, where there is a reference, its; `logprobs`, `entropy` are flat in the order of
    `batch.responses.values`.
    """

    batch: TrainBatch
    logprobs: np.ndarray
    entropy: np.ndarray
    buckets: Mapping[str, Buckets]

    @property
    def on_policy(self) -> bool:
        """Whether every ratio to the old policy is 1, so that no clip range acts yet."""
        assert self.batch.old_logprobs is not None  # scored() fills it in
        moved = np.abs(self.logprobs - self.batch.old_logprobs)[self.batch.mask]
        return bool((moved < ON_POLICY).all())

    @cached_property
    def inputs(self) -> LossInputs:
        """The whole batch as a loss sees it, padded to its longest response."""
        from rlbench.trainers.passes.step_plan import whole_inputs

        rows = self.batch.responses
        channels = {name: list(rows.with_values(getattr(self, name))) for name in ("logprobs", "entropy")}
        return whole_inputs(self.batch, [{"rows": np.arange(len(self.batch)), "channels": channels}], "current")

    def flat(self, padded: Any) -> np.ndarray:
        """A (sequences, longest) tensor in the batch's order, flat."""
        return flat(padded, self.batch)


def scored(batch: TrainBatch, tokens: Mapping[str, np.ndarray], turns: np.ndarray | None = None) -> Scored:
    """Put a batch and what a forward said of its tokens together; see `loss_lab`."""
    if not len(batch) or not batch.mask.any():
        raise DataError(f"{batch!r} has no trained token: nothing to compare losses on")
    logprobs, entropy = (_channel(batch, tokens, name) for name in ("logprobs", "entropy"))
    if logprobs is None or entropy is None:
        there = ", ".join(tokens) or "nothing"
        raise DataError(f"tokens has {there}; a loss needs 'logprobs' and 'entropy' of each token")
    old = _channel(batch, tokens, "old_logprobs")
    filled = batch.replace(
        old_logprobs=logprobs if old is None else old, ref_logprobs=_channel(batch, tokens, "ref_logprobs")
    )
    return Scored(filled, logprobs, entropy, _all_buckets(batch, turns))


def _channel(batch: TrainBatch, tokens: Mapping[str, np.ndarray], name: str) -> np.ndarray | None:
    """A per-token array, of the forward or else of the batch; checked."""
    given = tokens[name] if name in tokens else getattr(batch, name, None)
    if given is None:
        return None
    values = np.asarray(given, np.float32)
    if values.shape != batch.responses.values.shape:
        raise DataError(
            f"tokens[{name!r}] has shape {values.shape} for {batch.tokens} response tokens: is it of another batch?"
        )
    bad = int((~np.isfinite(values[batch.mask])).sum())
    if bad:
        raise DataError(f"tokens[{name!r}] is not finite on {bad} of {int(batch.mask.sum())} trained tokens")
    return values


# -- buckets


def _all_buckets(batch: TrainBatch, turns: np.ndarray | None) -> dict[str, Buckets]:
    sign = np.where(batch.advantages > 0, 0, np.where(batch.advantages < 0, 1, 2))
    return {
        "advantage": _bucketed(("+", "−", "0"), sign, batch.mask),
        "length": _by_length(batch),
        "turn": _by_turn(batch, turns),
    }


def _bucketed(labels: tuple[str, ...], of_token: np.ndarray, mask: np.ndarray) -> Buckets:
    counts = np.bincount(of_token[mask], minlength=len(labels))
    return Buckets(labels, of_token.astype(np.int64), counts / counts.sum())


def _by_length(batch: TrainBatch) -> Buckets:
    """Responses by their length in tokens, in up to four groups of about equally many."""
    lengths = batch.response_lengths
    inner = np.quantile(lengths, np.arange(1, LENGTH_BUCKETS) / LENGTH_BUCKETS, method="lower")
    edges = np.unique([*inner, lengths.max()])  # a bucket ends with its edge
    starts = np.concatenate([[lengths.min()], edges[:-1] + 1])
    labels = tuple(f"{low}–{high}" if low < high else f"{high}" for low, high in zip(starts, edges, strict=True))
    return _bucketed(labels, np.repeat(np.searchsorted(edges, lengths), lengths), batch.mask)


def _by_turn(batch: TrainBatch, turns: np.ndarray | None) -> Buckets:
    if turns is None:
        given = _runs(batch)
    else:
        given = np.asarray(turns)
        if given.shape != batch.mask.shape or given.dtype.kind not in "iu":
            raise DataError(f"turns: wanted {batch.mask.shape} whole numbers; got {given.dtype} {given.shape}")
        if int(given[batch.mask].min()) < 0:
            raise DataError(f"turns: trained tokens have turns from 0; seen {int(given[batch.mask].min())}")
    of_token = np.where(batch.mask, given, 0)
    return _bucketed(tuple(f"turn {i}" for i in range(int(of_token.max()) + 1)), of_token, batch.mask)


def _runs(batch: TrainBatch) -> np.ndarray:
    """The turn of each token, flat: trained tokens in a row are one."""
    from rlbench.rl.lab import turns_of
    from rlbench.trainers.passes.step_plan import pad_rows

    return flat(turns_of(pad_rows(batch.responses.with_values(batch.mask)) > 0), batch)


def flat(padded: Any, batch: TrainBatch) -> np.ndarray:
    """A (sequences, longest) tensor in the order of `batch.responses.values`."""
    values = padded.detach().cpu().numpy()
    return np.asarray(values[np.arange(values.shape[1])[None] < batch.response_lengths[:, None]])
