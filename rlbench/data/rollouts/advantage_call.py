"""How an advantage function is called: rewards and groups, and by name what else its signature asks for.

    def mine(rewards, group): ...                     # (B,) float64, (B,) int64 -> (B,) or (B, T)
    def mine(rewards, group, *, lengths, mask): ...   # the same, and what it names

Some of it the rollouts know by themselves, of an environment also `turns` and `token_rewards`; the rest is given to
`rollouts.batch(advantage=…, values=…)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.rollouts.turns import env_columns
from rlbench.errors import DataError, RLBenchError, nearest
from rlbench.traces import user_error
from rlbench.user_code import user_code

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts

OWN = ("mask", "lengths", "truncated", "logprobs")
GIVEN_PER_TOKEN = ("token_rewards", "values", "old_values", "ref_logprobs", "teacher_logprobs", "turns")
GIVEN_PER_ROW = ("baseline_rewards",)
GIVEN = (*GIVEN_PER_TOKEN, *GIVEN_PER_ROW, "components")


def given_columns(rollouts: Rollouts, given: Mapping[str, Any]) -> dict[str, Any]:
    """Bring what a user gave into one layout: `Ragged` per token, (B,) arrays per response.

    What is per token comes flat over all response tokens, or as one row per completion, in `.flat` order.
    """
    columns: dict[str, Any] = {}
    for name, value in given.items():
        if name in GIVEN_PER_TOKEN:
            columns[name] = _per_token(name, value, rollouts)
        elif name in GIVEN_PER_ROW:
            columns[name] = _per_row(name, value, rollouts.samples)
        elif name == "components":
            if not isinstance(value, Mapping):
                raise DataError(f"components: wanted {{name: rewards}}, got {type(value).__name__}")
            columns[name] = {key: _per_row(f"components[{key!r}]", v, rollouts.samples) for key, v in value.items()}
        else:
            raise DataError(f"batch: unknown {name!r}{nearest(name, GIVEN)}; known: {', '.join(GIVEN)}")
    return columns


def take_rows(columns: Mapping[str, Any], rows: np.ndarray) -> dict[str, Any]:
    """Return the same columns for some of the samples."""
    return {
        name: {key: v[rows] for key, v in value.items()}
        if isinstance(value, dict)
        else value.take(rows)
        if isinstance(value, Ragged)
        else value[rows]
        for name, value in columns.items()
    }


def call_advantage(
    advantage: Callable[..., Any], rollouts: Rollouts, mask: np.ndarray, columns: Mapping[str, Any]
) -> np.ndarray:
    """Return one advantage per response token, flat float32; `mask` flat bool, `columns` of `given_columns`."""
    import torch  # in the function: a kernel that only rolls out and looks never needs torch

    wanted = wanted_names(advantage)
    unused = sorted(set(columns) - set(wanted))
    if unused:
        raise DataError(f"batch: {', '.join(unused)} would have no effect: {_name(advantage)} does not take it")
    columns = {n: v for n, v in env_columns(rollouts).items() if n in wanted} | dict(columns)
    lacking = [n for n, optional in wanted.items() if n in GIVEN and n not in columns and not optional]
    if lacking:
        raise DataError(f"{_name(advantage)} needs {', '.join(lacking)}: give it as batch(advantage=…, {lacking[0]}=…)")
    own = {
        "mask": lambda: _padded(rollouts.responses.with_values(mask)),
        "lengths": lambda: torch.as_tensor(np.add.reduceat(mask, rollouts.responses.offsets[:-1], dtype=np.int64)),
        "truncated": lambda: torch.as_tensor(rollouts.truncated),
        "logprobs": lambda: _padded(rollouts.responses.with_values(rollouts.logprobs)),
    }
    asked: dict[str, Any] = {name: own[name]() for name in OWN if name in wanted}
    asked |= {name: _tensor(value) for name, value in columns.items()}
    group = torch.as_tensor(rollouts.group.astype(np.int64))
    try:
        with user_code():
            result = advantage(torch.as_tensor(rollouts.rewards), group, **asked)
    except RLBenchError:
        raise
    except Exception as error:  # a user's code: its own line is what to show
        said = f"{_name(advantage)} raised {type(error).__name__}: {error}"
        raise user_error(DataError, said, error) from error
    return _flat(result, rollouts)


def wanted_names(advantage: Callable[..., Any]) -> dict[str, bool]:
    """Return the names beyond the first two parameters, and whether each has a default."""
    try:
        parameters = list(inspect.signature(advantage).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature takes rewards and group
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict.fromkeys((*OWN, *GIVEN), True)
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if sum(p.kind is not p.KEYWORD_ONLY for p in parameters) >= 2:
        named = [p for p in named if p not in parameters[:2]]
    return {p.name: p.default is not p.empty for p in named if p.name in (*OWN, *GIVEN)}


def _flat(result: Any, rollouts: Rollouts) -> np.ndarray:
    """Bring (B,), (B, T) or flat (tokens,) advantages to flat float32."""
    import torch

    values = np.asarray(result.detach().cpu() if torch.is_tensor(result) else result, np.float32)
    tokens, lengths = len(rollouts.logprobs), rollouts.lengths
    width = int(lengths.max()) if len(lengths) else 0
    if values.shape == (rollouts.samples,):
        values = np.repeat(values, lengths)
    elif values.shape == (rollouts.samples, width):
        values = values[np.arange(width)[None] < lengths[:, None]]
    if values.shape != (tokens,):
        raise DataError(
            f"the advantage gave shape {values.shape}; wanted ({rollouts.samples},), one per completion, "
            f"({rollouts.samples}, {width}), one per token, or ({tokens},), one per response token in a row"
        )
    if not np.isfinite(values).all():
        raise DataError("the advantage gave values that are not finite")
    return values


def _per_token(name: str, value: Any, rollouts: Rollouts) -> Ragged:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype != object:
        flat = value
    else:
        rows = Ragged.from_rows(value, np.float32)
        if not np.array_equal(rows.lengths, rollouts.lengths):
            raise DataError(f"{name}: row lengths differ from the completions'; wanted one value per response token")
        flat = rows.values
    if flat.shape != rollouts.responses.values.shape:
        raise DataError(
            f"{name} has shape {flat.shape}; wanted {rollouts.responses.values.shape}, one per response token"
        )
    return rollouts.responses.with_values(flat)


def _per_row(name: str, value: Any, samples: int) -> np.ndarray:
    column = np.asarray(value, np.float64)
    if column.shape != (samples,):
        raise DataError(f"{name} has shape {column.shape}; wanted ({samples},), one per completion")
    return column


def _tensor(value: Any) -> Any:
    import torch

    if isinstance(value, dict):
        return {key: torch.as_tensor(v) for key, v in value.items()}
    return _padded(value) if isinstance(value, Ragged) else torch.as_tensor(value)


def _padded(rows: Ragged) -> Any:
    """(B, longest) tensor of the rows' dtype, zeros behind each row."""
    import torch

    lengths = rows.lengths
    width = int(lengths.max()) if len(lengths) else 0
    out = np.zeros((len(rows), width), rows.values.dtype)
    out[np.arange(width)[None] < lengths[:, None]] = rows.values
    return torch.as_tensor(out)


def _name(advantage: Any) -> str:
    return getattr(advantage, "__name__", None) or repr(advantage)
