"""Numbers beside every sampled token: what a channel is called, its unit, and how it comes from a batch and a step.

A channel is a flat float32 array in the order of `rollouts.responses.values`; NaN where it is not known, as for
completions that an interrupt cut and the batch left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlbench.data.batches.batch import TrainBatch
from rlbench.data.batches.columns import TEACHER
from rlbench.data.rollouts.contexts import sequences
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.data.record.metrics import Metrics
    from rlbench.data.rollouts.rollouts import Rollouts


class ChannelKind(NamedTuple):
    """How a channel reads. `label` is its short name, `unit` may be empty; `scale` is "signed" (around 0), "ratio"
    (around 1), "size" (from 0) or "flag" (0 or 1); `about` says what it is."""

    label: str
    unit: str
    scale: str
    about: str


KNOWN: Mapping[str, ChannelKind] = {
    "sampler_logprob": ChannelKind("sampler", "nats", "size", "log-prob of the token as the sampler drew it"),
    "advantage": ChannelKind("adv", "", "signed", "advantage the loss weighs the token with"),
    "trainer_logprob": ChannelKind("trainer", "nats", "size", "log-prob under the trained weights as a step began"),
    "difference": ChannelKind("trainer − sampler", "nats", "signed", "trainer's log-prob minus the sampler's"),
    "ratio": ChannelKind("ratio", "", "ratio", "probability under the trained weights over that of the old policy"),
    "entropy": ChannelKind("H", "nats", "size", "entropy of the trainer's next-token distribution"),
    "ref_kl": ChannelKind("ref KL", "nats", "size", "k3 estimate of the KL divergence to the reference policy"),
    "clipped": ChannelKind("clipped", "", "flag", "1 where the loss's clip range cut the token's gradient off"),
    "mask": ChannelKind("trained", "", "flag", "1 where the token was trained on, 0 where an environment said it"),
    "turn": ChannelKind("turn", "", "size", "turn of the conversation, from 0; an observation's is that it answers"),
    "old_logprob": ChannelKind("old", "nats", "size", "log-prob under the old policy: that which saw the batch first"),
    "ref_logprob": ChannelKind("reference", "nats", "size", "log-prob under the reference policy"),
    "teacher_logprob": ChannelKind("teacher", "nats", "size", "log-prob under a teacher: teacher.score(rollouts)"),
}
"""The standard channels, in the order they are shown. Any other name may be given too."""

SAMPLER = "sampler_logprob"
TEACHER_CHANNEL = "teacher_logprob"
FROM_STEP = {
    "logprobs": "trainer_logprob",
    "entropy": "entropy",
    "old_logprobs": "old_logprob",
    "ref_logprobs": "ref_logprob",
    "clip_fraction": "clipped",
}
"""What `train_step` calls a channel, and what it is called here; others keep the name their loss gave them."""
LOG_RATIO_BOUND = 20.0
"""Where the k3 estimate stays constant, as in `rlbench.rl.k3`: it would overflow beyond."""


def kind_of(name: str, values: np.ndarray) -> ChannelKind:
    """How to read a channel: the standard one of that name, else by whether its values have both signs."""
    if name in KNOWN:
        return KNOWN[name]
    low, high = (float(np.nanmin(values)), float(np.nanmax(values))) if np.isfinite(values).any() else (0.0, 0.0)
    return ChannelKind(name, "", "signed" if low < 0 < high else "size", "")


def all_channels(rollouts: Rollouts) -> dict[str, np.ndarray]:
    """Every channel there is, the sampler's log-probs too; standard ones first, in the order of `KNOWN`.

    Of an environment's tokens there is no log-prob: NaN, as in `difference` and what else comes from it.
    """
    channels: dict[str, np.ndarray] = {SAMPLER: rollouts.logprobs}
    if rollouts.mask is not None and rollouts.turns is not None:
        channels[SAMPLER] = np.where(rollouts.mask, rollouts.logprobs, np.float32(np.nan))
        channels |= {"mask": rollouts.mask.astype(np.float32), "turn": rollouts.turns.astype(np.float32)}
    channels |= rollouts.channels
    return {name: channels[name] for name in (*KNOWN, *channels) if name in channels}


def as_channel(name: str, values: Any, rollouts: Rollouts) -> np.ndarray:
    """Bring what a user gave, flat over all response tokens or one row per completion, to a channel: flat float32."""
    if name == SAMPLER:
        raise DataError(f"{SAMPLER} is what the sampler said and cannot be replaced: give the channel another name")
    return rollouts.responses.flat(f"channel {name}", values).astype(np.float32)


def batch_channels(rollouts: Rollouts, batch: TrainBatch, metrics: Metrics | None = None) -> dict[str, np.ndarray]:
    """The channels a batch and a step on it add to the rollouts the batch was made from; see `Rollouts.with_batch`."""
    starts = _starts_of(rollouts, batch)
    optional = {"old_logprob": batch.old_logprobs, "ref_logprob": batch.ref_logprobs}
    own = {name: value for name, value in batch.columns.items() if value.ndim == 1}
    channels = {TEACHER_CHANNEL if name == TEACHER else name: value for name, value in own.items()}
    channels |= {"advantage": batch.advantages, "mask": batch.mask}
    channels |= {name: value for name, value in optional.items() if value is not None}
    for name, value in ({} if metrics is None else metrics.tokens).items():
        if np.shape(value) != batch.responses.values.shape:
            raise DataError(
                f"metrics.tokens[{name!r}] has shape {np.shape(value)} for {batch.tokens} response tokens: "
                "these metrics are of another batch"
            )
        channels[FROM_STEP.get(name, name)] = np.asarray(value, np.float32)
    channels |= _derived(channels, batch.sampler_logprobs)
    spread = {name: _spread(value, starts, rollouts, batch) for name, value in channels.items()}
    if rollouts.mask is not None:  # the sampler drew none of an environment's tokens
        for name in ("difference", *(() if "old_logprob" in channels else ("ratio",))):
            if name in spread:
                spread[name][~rollouts.mask] = np.nan
    return spread


def _derived(found: Mapping[str, np.ndarray], sampler: np.ndarray) -> dict[str, np.ndarray]:
    """What follows from the trainer's log-probs; without old log-probs the ratio is to the sampler."""
    trainer = found.get("trainer_logprob")
    if trainer is None:
        return {}
    old = found.get("old_logprob")
    more = {"difference": trainer - sampler, "ratio": np.exp(trainer - (sampler if old is None else old))}
    if "ref_logprob" in found:
        log_ratio = np.clip(found["ref_logprob"] - trainer, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        more["ref_kl"] = np.expm1(log_ratio) - log_ratio
    return {name: value.astype(np.float32) for name, value in more.items() if name not in found}


def _starts_of(rollouts: Rollouts, batch: TrainBatch) -> np.ndarray:
    """Where among all response tokens each sequence of the batch begins, (B,) int64, found by its tokens and sampler
    log-probs.

    Equal ones (the same prompt and answer drawn twice) are told apart by group, then taken in order.
    """
    known = sequences(rollouts)
    places: dict[tuple[bytes, ...], list[int]] = defaultdict(list)
    sampled = known.responses.with_values(rollouts.logprobs[known.tokens])
    for i, (prompt, response, own) in enumerate(zip(known.prompts, known.responses, sampled, strict=True)):
        places[prompt.tobytes(), response.tobytes(), own.tobytes()].append(i)
    by_row = batch.responses.with_values(batch.sampler_logprobs)
    rows = np.empty(len(batch), np.int64)
    for b in range(len(batch)):
        there = places.get((batch.prompts[b].tobytes(), batch.responses[b].tobytes(), by_row[b].tobytes()))
        if not there:
            raise DataError(
                f"with_batch: sequence {b} of the batch ({len(batch.responses[b])} tokens) is none of these "
                f"{rollouts.samples} completions: give the batch that was made from these rollouts"
            )
        group = rollouts.group[known.sample[there]]
        same = next((k for k, own in enumerate(group) if own == batch.group[b]), 0)
        rows[b] = there.pop(same)
    return known.starts[rows]


def _spread(values: np.ndarray, starts: np.ndarray, rollouts: Rollouts, batch: TrainBatch) -> np.ndarray:
    """A batch's values at the places its sequences have among the rollouts; NaN elsewhere."""
    out = np.full(len(rollouts.logprobs), np.nan, np.float32)
    moved = starts - batch.responses.offsets[:-1]
    out[np.arange(batch.tokens) + np.repeat(moved, batch.response_lengths)] = values
    return out
