"""How an advantage function is called: rewards and groups, and by name what else its signature asks for.

    def mine(rewards, group, *, lengths, mask): ...   # (B,) float64, (B,) int64, and what it names -> (B,) or (B, T)

Some of it the rollouts know, of an environment also `turns` and `token_rewards`; the rest is given to `rollouts.batch`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.rollouts.branches import nodes
from rlbench.data.rollouts.turns import env_columns
from rlbench.errors import DataError, RLBenchError, nearest
from rlbench.traces import user_error
from rlbench.user_code import name_of, user_code

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts

OWN = ("mask", "lengths", "truncated", "logprobs", "nodes", "versions", "labels", "meta", "rollouts")
GIVEN_PER_TOKEN = ("token_rewards", "values", "old_values", "ref_logprobs", "teacher_logprobs", "turns", "entropy")
GIVEN = (*GIVEN_PER_TOKEN, "baseline_rewards", "components")
FOUND = {"ref_logprobs": "ref_logprob", "teacher_logprobs": "teacher_logprob", "entropy": "entropy"}
"""What an advantage finds in a channel of the rollouts without being given it, and the channel."""


def check_advantage(advantage: Any) -> None:
    """Refuse what cannot be called with rewards and groups."""
    if isinstance(advantage, type):
        raise DataError(f"{advantage.__name__} is made by calling it: advantage={advantage.__name__}()")
    if not callable(advantage):
        raise DataError(
            f"advantage={advantage!r}: wanted a value of rb.rl, as rb.rl.group_normalized() (GRPO's) or rb.rl.rloo(), "
            "or a function of rewards and group"
        )


def given_columns(rollouts: Rollouts, given: Mapping[str, Any]) -> dict[str, Any]:
    """Bring what a user gave into one layout: `Ragged` per token, (B,) arrays per response.

    What is per token comes flat over all response tokens, or as one row per completion, in `.flat` order.
    """
    columns: dict[str, Any] = {}
    for name, value in given.items():
        if name in GIVEN_PER_TOKEN:
            columns[name] = rollouts.responses.with_values(rollouts.responses.flat(name, value))
        elif name == "baseline_rewards":
            columns[name] = _per_row(name, value, rollouts.samples)
        elif name == "components":
            if not isinstance(value, Mapping):
                raise DataError(f"components: wanted {{name: rewards}}, got {type(value).__name__}")
            columns[name] = {key: _per_row(f"components[{key!r}]", v, rollouts.samples) for key, v in value.items()}
        else:
            raise DataError(f"batch: unknown {name!r}{nearest(name, GIVEN)}; known: {', '.join(GIVEN)}")
    return columns


def take_rows(column: Any, rows: np.ndarray) -> Any:
    """Return one of these columns for some of the samples."""
    if isinstance(column, dict):
        return {key: values[rows] for key, values in column.items()}
    return column.take(rows) if isinstance(column, Ragged) else column[rows]


def call_advantage(
    advantage: Callable[..., Any], rollouts: Rollouts, mask: np.ndarray, columns: Mapping[str, Any]
) -> np.ndarray:
    """Return one advantage per response token, flat float32; `mask` flat bool, `columns` of `given_columns`."""
    import torch  # in the function: a kernel that only rolls out and looks never needs torch

    wanted = wanted_names(advantage)
    unused = sorted(set(columns) - set(wanted))
    if unused:
        raise DataError(f"batch: {', '.join(unused)} would have no effect: {name_of(advantage)} does not take it")
    known = {name: v for name, channel in FOUND.items() if (v := rollouts.channels.get(channel)) is not None}
    of_channels = {n: rollouts.responses.with_values(v) for n, v in known.items()}
    columns = {n: v for n, v in (of_channels | env_columns(rollouts)).items() if n in wanted} | dict(columns)
    lacking = [n for n, optional in wanted.items() if n in GIVEN and n not in columns and not optional]
    if lacking:
        raise DataError(
            f"{name_of(advantage)} needs {', '.join(lacking)}: give it as batch(advantage=…, {lacking[0]}=…)"
        )
    own: dict[str, Any] = {
        "mask": rollouts.responses.with_values(mask),
        "lengths": np.add.reduceat(mask, rollouts.responses.offsets[:-1], dtype=np.int64),
        "truncated": rollouts.truncated,
        "logprobs": rollouts.responses.with_values(rollouts.logprobs),
        "versions": rollouts.versions,
    }
    if "nodes" in wanted:
        own["nodes"] = rollouts.responses.with_values(nodes(rollouts))
    columns |= {name: value for name, value in own.items() if name in wanted}
    asked = {name: _tensor(value) for name, value in columns.items()}
    about = [rollouts.prompts[number] for number in rollouts.group.tolist()] if {"labels", "meta"} & set(wanted) else []
    plain = {"labels": [p.label for p in about], "meta": [p.meta for p in about], "rollouts": rollouts}
    asked |= {name: value for name, value in plain.items() if name in wanted}
    group = torch.as_tensor(rollouts.group.astype(np.int64))
    try:
        with user_code():
            rewards = np.zeros(rollouts.samples) if rollouts.rewards is None else rollouts.rewards
            result = advantage(torch.as_tensor(rewards), group, **asked)
    except RLBenchError:
        raise
    except Exception as error:  # a user's code: its own line is what to show
        raise user_error(DataError, f"{name_of(advantage)} raised {type(error).__name__}: {error}", error) from error
    return _flat(result, rollouts)


def no_advantage(rewards: Any, group: Any) -> Any:
    """Give each completion 0: the loss will not read it."""
    return np.zeros(len(group))


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
    known = (*OWN, *GIVEN)
    unknown = [p.name for p in named if p.name not in known and p.default is p.empty]
    if unknown:
        raise DataError(
            f"{name_of(advantage)} asks for {unknown[0]!r}{nearest(unknown[0], known)}; an advantage is given rewards "
            f"and group, and by name {', '.join(known)}"
        )
    return {p.name: p.default is not p.empty for p in named if p.name in known}


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
        wanted = f"({rollouts.samples},), ({rollouts.samples}, {width}) or flat over response tokens ({tokens},)"
        raise DataError(f"the advantage gave shape {values.shape}; wanted {wanted}")
    if not np.isfinite(values).all():
        raise DataError("the advantage gave values that are not finite")
    return values


def _per_row(name: str, value: Any, samples: int) -> np.ndarray:
    column = np.asarray(value, np.float64)
    if column.shape != (samples,):
        raise DataError(f"{name} has shape {column.shape}; wanted ({samples},), one per completion")
    return column


def _tensor(value: Any) -> Any:
    import torch

    if isinstance(value, dict):
        return {key: torch.as_tensor(v) for key, v in value.items()}
    return torch.as_tensor(value.padded() if isinstance(value, Ragged) else value)
