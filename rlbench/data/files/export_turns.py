"""The columns that an environment adds to the Parquet file of rollouts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.arrow import list_column, ragged_column

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts


def turn_columns(rollouts: Rollouts, nulls: int) -> dict[str, Any]:
    """`mask`, `turn`, `turn_reward`, `env_reward` and `info_json`, then so many nulls; empty without an environment."""
    import pyarrow as pa

    if rollouts.mask is None or rollouts.turns is None or rollouts.turn_rewards is None:
        return {}
    assert rollouts.env_rewards is not None
    none = [None] * nulls
    infos = [json.dumps(dict(info)) for info in rollouts.infos] or ["{}"] * rollouts.samples
    return {
        "mask": list_column(rollouts.responses.with_values(rollouts.mask), nulls, pa.bool_()),
        "turn": list_column(rollouts.responses.with_values(rollouts.turns), nulls, pa.int32()),
        "turn_reward": list_column(rollouts.turn_rewards, nulls, pa.float64()),
        "env_reward": pa.array([*rollouts.env_rewards.tolist(), *none], pa.float64()),
        "info_json": pa.array([*infos, *none], pa.large_string()),
    }


def turn_fields(rows: Any, logprobs: np.ndarray, there: bool) -> dict[str, Any]:
    """The fields of `Rollouts` from those columns, the log-probs among them: 0 where a token was observed."""
    if not there:
        return {"logprobs": logprobs}
    mask = ragged_column(rows["mask"], bool).values
    return {
        "logprobs": np.where(mask, logprobs, np.float32(0.0)),
        "mask": mask,
        "turns": ragged_column(rows["turn"], np.int32).values,
        "turn_rewards": ragged_column(rows["turn_reward"], np.float64),
        "env_rewards": rows["env_reward"].to_numpy().astype(np.float64),
        "infos": tuple(json.loads(text) for text in rows["info_json"].to_pylist()),
    }
