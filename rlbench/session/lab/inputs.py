"""What a loss lab works on: a batch with the log-probs of one forward, and its tokens sorted into buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import TrainBatch
from rlbench.errors import DataError, LossError
from rlbench.units import format_bytes

if TYPE_CHECKING:
    from rlbench.rl.types import LossInputs

LENGTH_BUCKETS = 4
MOST_BYTES = 1 << 30
WIDE = (("hidden_states", "hidden_size"), ("logits", "vocab_size"))
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

    `batch` knows old log-probs and, where there is a reference, its; `tokens` are `logprobs`, `entropy` and what losses
    asked for beside them, by name, flat in the order of `batch.responses.values`.
    """

    batch: TrainBatch
    tokens: Mapping[str, np.ndarray]
    buckets: Mapping[str, Buckets]

    @property
    def logprobs(self) -> np.ndarray:
        """Of the trainer, flat float32."""
        return self.tokens["logprobs"]

    @property
    def entropy(self) -> np.ndarray:
        """Of the trainer's distributions, flat float32."""
        return self.tokens["entropy"]

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
        channels = {name: rows.with_values(values) for name, values in self.tokens.items()}
        return whole_inputs(self.batch, [{"rows": np.arange(len(self.batch)), "channels": channels}], "recompute")


def need_room_for(batch: TrainBatch, needs: Sequence[str], widths: Mapping[str, Any]) -> None:
    """Refuse to bring more hidden states or logits to the kernel than `MOST_BYTES`."""
    width = sum(int(widths[size]) for need, size in WIDE if need in needs)
    if (nbytes := 4 * width * batch.tokens) > MOST_BYTES:
        raise LossError(
            f"the lab would bring {format_bytes(nbytes)} of hidden states or logits here, for {batch.tokens} response "
            f"tokens, and takes {format_bytes(MOST_BYTES)}: give it some rows, batch[:{max(1, len(batch) // 16)}]"
        )


def scored(batch: TrainBatch, tokens: Mapping[str, np.ndarray]) -> Scored:
    """Put a batch and what a forward said of its tokens together; without old log-probs it is its first step."""
    logprobs, entropy = tokens["logprobs"], tokens["entropy"]
    if batch.old_logprobs is None:
        batch = batch.replace(old_logprobs=logprobs)
    of_batch = {name: getattr(batch, name) for name in ("old_logprobs", "ref_logprobs")}
    for name, values in {"logprobs": logprobs, "entropy": entropy, **of_batch}.items():
        bad = 0 if values is None else int((~np.isfinite(values[batch.mask])).sum())
        if bad:
            raise DataError(f"{name} is not finite on {bad} of {int(batch.mask.sum())} trained tokens")
    return Scored(batch, tokens, _all_buckets(batch))


def flat(padded: Any, batch: TrainBatch) -> np.ndarray:
    """Return a (sequences, longest) tensor in the order of `batch.responses.values`."""
    values = padded.detach().cpu().numpy()
    return np.asarray(values[np.arange(values.shape[1])[None] < batch.response_lengths[:, None]])


# -- buckets


def _all_buckets(batch: TrainBatch) -> dict[str, Buckets]:
    sign = np.where(batch.advantages > 0, 0, np.where(batch.advantages < 0, 1, 2))
    turn = np.where(batch.mask, _turns(batch), 0)
    return {
        "advantage": _bucketed(("+", "−", "0"), sign, batch.mask),
        "length": _by_length(batch),
        "turn": _bucketed(tuple(f"turn {i}" for i in range(int(turn.max()) + 1)), turn, batch.mask),
    }


def _bucketed(labels: tuple[str, ...], of_token: np.ndarray, mask: np.ndarray) -> Buckets:
    counts = np.bincount(of_token[mask], minlength=len(labels))
    return Buckets(labels, of_token.astype(np.int64), counts / counts.sum())


def _by_length(batch: TrainBatch) -> Buckets:
    """Sort responses by their length in tokens, in up to four groups of about equally many."""
    lengths = batch.response_lengths
    inner = np.quantile(lengths, np.arange(1, LENGTH_BUCKETS) / LENGTH_BUCKETS, method="lower")
    edges = np.unique([*inner, lengths.max()])  # a bucket ends with its edge
    starts = np.concatenate([[lengths.min()], edges[:-1] + 1])
    labels = tuple(f"{low}–{high}" if low < high else f"{high}" for low, high in zip(starts, edges, strict=True))
    return _bucketed(labels, np.repeat(np.searchsorted(edges, lengths), lengths), batch.mask)


def _turns(batch: TrainBatch) -> np.ndarray:
    """Return the turn of each token, flat: trained tokens in a row are one."""
    from rlbench.rl.lab import turns_of
    from rlbench.trainers.passes.step_plan import pad_rows

    return flat(turns_of(pad_rows(batch.responses.with_values(batch.mask)) > 0), batch)
