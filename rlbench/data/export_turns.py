"""List columns of the Parquet file, and those an environment adds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.ragged import Ragged, offsets_of

if TYPE_CHECKING:
    from rlbench.data.rollouts import Rollouts


def turn_columns(rollouts: Rollouts, nulls: int) -> dict[str, Any]:
    """`mask`, `turn`, `turn_reward`, `env_reward` and `info_json`, then so many nulls; empty without an environment."""
    import pyarrow as pa

    if rollouts.mask is None or rollouts.turns is None or rollouts.turn_rewards is None:
        return {}
    assert rollouts.env_rewards is not None
    none = [None] * nulls
    infos = [json.dumps(dict(info)) for info in rollouts.infos] or ["{}"] * rollouts.samples
    return {
        "mask": lists(rollouts.responses.with_values(rollouts.mask), nulls, pa.bool_()),
        "turn": lists(rollouts.responses.with_values(rollouts.turns), nulls, pa.int32()),
        "turn_reward": lists(rollouts.turn_rewards, nulls, pa.float64()),
        "env_reward": pa.array([*rollouts.env_rewards.tolist(), *none], pa.float64()),
        "info_json": pa.array([*infos, *none], pa.large_string()),
    }


def turn_fields(rows: Any, logprobs: np.ndarray, there: bool) -> dict[str, Any]:
    """The fields of `Rollouts` from those columns, the log-probs among them: 0 where a token was observed."""
    if not there:
        return {"logprobs": logprobs}
    mask = ragged(rows["mask"], bool).values
    return {
        "logprobs": np.where(mask, logprobs, np.float32(0.0)),
        "mask": mask,
        "turns": ragged(rows["turn"], np.int32).values,
        "turn_rewards": ragged(rows["turn_reward"], np.float64),
        "env_rewards": rows["env_reward"].to_numpy().astype(np.float64),
        "infos": tuple(json.loads(text) for text in rows["info_json"].to_pylist()),
    }


def lists(rows: Ragged, nulls: int, kind: Any) -> Any:
    """A list column of ragged rows, then so many nulls, without a Python object per number."""
    import pyarrow as pa

    offsets = np.concatenate([rows.offsets, np.full(nulls, rows.offsets[-1])])
    absent = np.zeros(len(offsets) - 1, bool)
    absent[len(rows) :] = True
    return pa.LargeListArray.from_arrays(
        pa.array(offsets, pa.int64()), pa.array(rows.values, kind), mask=pa.array(absent) if nulls else None
    )


def ragged(column: Any, dtype: type) -> Ragged:
    """A list column as ragged rows; nulls are left out."""
    import pyarrow as pa

    arrays = [chunk for chunk in column.chunks if len(chunk)]
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in arrays]
    lengths = [pa.compute.list_value_length(chunk).to_numpy(zero_copy_only=False) for chunk in arrays]
    return Ragged(
        np.concatenate([np.zeros(0), *values]).astype(dtype)
        if not values
        else np.concatenate(values).astype(dtype),
        offsets_of(np.concatenate(lengths).astype(np.int64) if lengths else []),
    )
