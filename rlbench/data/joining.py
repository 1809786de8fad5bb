"""`rb.data.join`: rollouts, batches or sets of prompts, one after another, as one value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.batch import PER_ROW, PER_TOKEN, TrainBatch
from rlbench.data.prompts.set import PromptSet
from rlbench.data.rollouts.joining import join_rollouts, joined_ragged
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.errors import DataError

Value = TypeVar("Value", Rollouts, TrainBatch, PromptSet)


def join(*values: Value | Iterable[Value], same_prompts: bool = False, drop_unknown: bool = False) -> Value:
    """Join values of one kind, in the given order; `a + b` is `join(a, b)`.

        rollouts = rb.data.join(monday, tuesday, same_prompts=True)     # 8 + 8 completions of each prompt: groups of 16
        batch = rb.data.join(fresh.batch(advantage=a), replayed)        # groups stay apart

    Rollouts: prompts are numbered anew. Sampling options that only say when a completion ends (`max_tokens`, `stop`, …)
    are left out where they differ. What only some know is NaN in the others (channels, components of rewards), or what
    it means to say nothing: tokens sampled in one turn.
    Batches: groups are numbered anew and never merged; advantages stay as they are.
    Prompt sets: lengths are kept where all know them.

    Args:
        values: two or more, or one list of them.
        same_prompts: of rollouts: completions of equal prompts (content, label and meta) become one group.
        drop_unknown: leave out what only some know, of rollouts the `rewards`, of batches `old_logprobs`, `rewards`, …;
            otherwise that is refused.
    """
    parts = _parts(values)
    first = parts[0]
    for i, part in enumerate(parts):
        if type(part) is not type(first):
            raise DataError(
                f"join: value {i} is a {type(part).__name__}, the first a {type(first).__name__}: join one kind"
            )
    if same_prompts and not isinstance(first, Rollouts):
        raise DataError(f"join: same_prompts= is of rollouts; these are {type(first).__name__}")
    if drop_unknown and isinstance(first, PromptSet):
        raise DataError("join: drop_unknown= is of rollouts and batches; these are prompt sets")
    joined: Any
    if isinstance(first, Rollouts):
        joined = join_rollouts(parts, same_prompts, drop_unknown)
    elif isinstance(first, TrainBatch):
        joined = join_batches(parts, drop_unknown)
    else:
        joined = _prompt_sets(parts)
    return cast(Value, joined)


def _parts(values: Sequence[Any]) -> list[Any]:
    kinds = (Rollouts, TrainBatch, PromptSet)
    found = list(values[0]) if len(values) == 1 and not isinstance(values[0], kinds) else list(values)
    if not found:
        raise DataError("join: nothing to join: give two or more rollouts, batches or prompt sets")
    for i, part in enumerate(found):
        if not isinstance(part, kinds):
            raise DataError(f"join: value {i} is a {type(part).__name__}: wanted rollouts, batches or prompt sets")
    return found


def join_batches(parts: Sequence[TrainBatch], drop_unknown: bool = False, renumber: bool = True) -> TrainBatch:
    """See `join`; without `renumber` the group numbers stay, so that a group cut in two is whole again."""
    temperatures = sorted({part.temperature for part in parts})
    if len(temperatures) > 1:
        raise DataError(
            f"join: the batches were sampled at temperatures {', '.join(map(str, temperatures))}, and a step trains "
            "at one: train on them one after another"
        )
    joined: dict[str, Any] = {}
    unknown: list[str] = []
    for field in fields(TrainBatch):
        name = field.name
        values = [getattr(part, name) for part in parts]
        if name == "reshaped_by":
            joined[name] = tuple(dict.fromkeys(option for part in parts for option in part.reshaped_by))
        elif isinstance(values[0], Ragged):
            joined[name] = joined_ragged(values)
        elif name == "group" and renumber:
            joined[name] = _renumbered(values)
        elif name in (*PER_TOKEN, *PER_ROW):
            missing = sum(value is None for value in values)
            unknown += [name] if 0 < missing < len(values) else []
            joined[name] = None if missing else np.concatenate(values)
    if unknown and not drop_unknown:
        raise DataError(
            f"join: only some of the batches have {', '.join(unknown)}: give them to all, or join(…, drop_unknown=True)"
        )
    return replace(parts[0], **joined)


def _renumbered(groups: Sequence[np.ndarray]) -> np.ndarray:
    """Count the groups from zero, those of each part after those of the parts before."""
    found, used = [], 0
    for group in groups:
        known, index = np.unique(group, return_inverse=True)
        found.append((index + used).astype(group.dtype))
        used += len(known)
    return np.concatenate(found)


def _prompt_sets(parts: list[PromptSet]) -> PromptSet:
    lengths = [part.lengths for part in parts]
    names, limits = {part.name for part in parts}, {part.max_prompt_tokens for part in parts}
    return PromptSet(
        prompts=tuple(prompt for part in parts for prompt in part),
        name=names.pop() if len(names) == 1 else "",
        lengths=None if any(known is None for known in lengths) else np.concatenate(lengths),  # type: ignore[arg-type]
        max_prompt_tokens=limits.pop() if len(limits) == 1 else None,
        too_long=tuple(long for part in parts for long in part.too_long),
    )
