"""From scored rollouts to a batch to train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.batches.batch import TrainBatch, media_of
from rlbench.data.batches.columns import TEACHER
from rlbench.data.prompts.sampling import reshaped_by
from rlbench.data.record.origin import made_with
from rlbench.data.rollouts import scoring, taking
from rlbench.data.rollouts.advantage_call import call_advantage, check_advantage, given_columns, no_advantage, take_rows
from rlbench.data.rollouts.channels import TEACHER_CHANNEL
from rlbench.data.rollouts.contexts import sequences
from rlbench.data.rollouts.turns import sampled_mask
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts


def batch(
    rollouts: Rollouts, advantage: Callable[..., Any] | None, drop_aborted: bool, columns: Mapping[str, Any]
) -> TrainBatch:
    """See `Rollouts.batch`."""
    if advantage is not None:
        check_advantage(advantage)
    kept = ~rollouts.aborted if drop_aborted else np.ones(rollouts.samples, bool)
    kept &= rollouts.lengths > 0
    if not kept.any():
        raise DataError("no finished completion is left to train on: roll out again, or batch(drop_aborted=False)")
    rows = np.flatnonzero(kept)
    if advantage is None and columns:
        raise DataError(f"batch: {', '.join(columns)} would have no effect without an advantage")
    needs_rewards = advantage is not None and getattr(advantage, "needs_rewards", True)
    if needs_rewards or rollouts.rewards is not None:
        scoring.check_known(rollouts, rows)
    called = advantage or no_advantage
    columns = scoring.with_components(rollouts, called, columns, rows)
    chosen = rollouts if kept.all() else taking.samples(rollouts, rows)
    given = {name: take_rows(column, rows) for name, column in given_columns(rollouts, columns).items()}
    mask, taught = sampled_mask(chosen), chosen.channels.get(TEACHER_CHANNEL)
    advantages = call_advantage(called, chosen, mask, given)
    parts = sequences(chosen)
    tokens, sample = parts.tokens, parts.sample
    columns = ({} if taught is None else {TEACHER: taught}) | dict(chosen.columns)
    held = {name: rows for name, rows in media_of(chosen).items() if rows is not None}
    media: dict[str, Any] = {name: tuple(rows[i] for i in sample) for name, rows in held.items()}
    made = TrainBatch(
        prompts=parts.prompts,
        responses=parts.responses,
        mask=mask[tokens],
        advantages=advantages[tokens],
        sampler_logprobs=chosen.logprobs[tokens],
        group=chosen.group[sample],
        weight_version=chosen.versions[sample],
        rewards=None if chosen.rewards is None else np.asarray(chosen.rewards)[sample],
        truncated=chosen.truncated[sample],
        temperature=float(rollouts.sampling.get("temperature", 1.0)),
        reshaped_by=reshaped_by(rollouts.sampling),
        columns={name: column[tokens] for name, column in columns.items()},
        **media,
        routing=parts.routing,
    )
    return made_with(made, rollouts, advantage=called)
