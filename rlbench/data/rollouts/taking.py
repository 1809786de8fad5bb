"""Some of rollouts: chosen completions, or those of chosen prompts; every column keeps to its completions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.record.origin import keeps_makers

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts

PER_TOKEN = ("logprobs", "mask", "turns")
PER_SAMPLE = ("group", "finish", "versions", "rewards", "reward_seconds", "env_rewards")


@keeps_makers
def samples(rollouts: Rollouts, rows: np.ndarray) -> Rollouts:
    """Return the completions of these numbers, in this order; prompts stay."""
    responses = rollouts.responses
    columns: dict[str, Any] = {name: responses.pick(getattr(rollouts, name), rows) for name in PER_TOKEN}
    columns |= {name: value[rows] for name in PER_SAMPLE if (value := getattr(rollouts, name)) is not None}
    return replace(
        rollouts,
        responses=responses.take(rows),
        texts=tuple(rollouts.texts[i] for i in rows),
        turn_rewards=None if rollouts.turn_rewards is None else rollouts.turn_rewards.take(rows),
        infos=tuple(rollouts.infos[i] for i in rows) if rollouts.infos else (),
        observed_images=tuple(rollouts.observed_images[i] for i in rows) if rollouts.observed_images else (),
        channels={name: responses.pick(values, rows) for name, values in rollouts.channels.items()},
        columns={name: responses.pick(values, rows) for name, values in rollouts.columns.items()},
        components={name: values[rows] for name, values in rollouts.components.items()},
        reward_errors=rollouts.reward_errors.taken(rows),
        routing=None if rollouts.routing is None else rollouts.routing.take(rows),
        **columns,
    )


@keeps_makers
def of_prompts(rollouts: Rollouts, chosen: np.ndarray) -> Rollouts:
    """Return the prompts of these numbers with their completions."""
    where = {int(p): i for i, p in enumerate(chosen)}
    rows = np.concatenate([np.flatnonzero(rollouts.group == p) for p in chosen]) if len(chosen) else np.zeros(0, int)
    taken = samples(rollouts, rows)
    return replace(
        taken,
        prompts=tuple(rollouts.prompts[p] for p in chosen),
        prompt_ids=rollouts.prompt_ids.take(chosen),
        group=np.array([where[int(g)] for g in taken.group], np.int32),
        not_started=tuple(where[p] for p in rollouts.not_started if p in where),
    )
