"""`rb.data.join`: rollouts, batches or sets of prompts, one after another, as one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np

from rlbench.data.base import plain
from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.data.base.routing import join_routing
from rlbench.data.batches.batch import PER_ROW, PER_TOKEN, TrainBatch
from rlbench.data.batches.columns import join_columns
from rlbench.data.batches.verdicts import joined_verdicts
from rlbench.data.prompts.placing import KINDS
from rlbench.data.prompts.set import PromptSet
from rlbench.data.rollouts import taking
from rlbench.data.rollouts.merging import joined_stats
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.data.rollouts.scoring import RewardErrors
from rlbench.errors import DataError

Value = TypeVar("Value", Rollouts, TrainBatch, PromptSet)

ONLY_LENGTH = ("max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed")
"""Sampling options that do not change what a log-prob is of."""
DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
ABSENT: dict[str, Callable[[Rollouts], Any]] = {
    "mask": lambda part: np.ones(len(part.logprobs), bool),
    "turns": lambda part: np.zeros(len(part.logprobs), np.int32),
    "turn_rewards": lambda part: Ragged(np.full(part.samples, np.nan), np.arange(part.samples + 1)),
    "env_rewards": lambda part: np.full(part.samples, np.nan),
    "reward_seconds": lambda part: np.full(part.samples, np.nan),
    "infos": lambda part: ({},) * part.samples,
    "observed_images": lambda part: ((),) * part.samples,
}
"""What stands for a field that one of the rollouts lacks: all tokens sampled in one turn, a reward not known."""


def join(*values: Value | Iterable[Value], same_prompts: bool = False) -> Value:
    """Join values of one kind, in the given order; `a + b` is `join(a, b)`.

        rollouts = rb.data.join(monday, tuesday, same_prompts=True)     # 8 + 8 completions of each prompt: groups of 16

    Rollouts: prompts are numbered anew. Sampling options that only say when a completion ends (`max_tokens`, `stop`, …)
    are left out where they differ. What only some know is NaN in the others (channels, components of rewards), or what
    it means to say nothing: tokens sampled in one turn, experts not known.
    Batches: groups are numbered anew and never merged; advantages stay as they are.
    Prompt sets: lengths are kept where all know them.

    Args:
        values: two or more, or one list of them.
        same_prompts: of rollouts: completions of equal prompts (content, label and meta) become one group.
    """
    parts: list[Any] = list(values if len(values) != 1 or type(values[0]) in JOINS else cast(Iterable[Any], values[0]))
    kinds = {type(part) for part in parts}
    if len(kinds) != 1 or not kinds <= set(JOINS):
        seen = ", ".join(dict.fromkeys(type(part).__name__ for part in parts)) or "nothing"
        raise DataError(f"join: wanted rollouts, batches or prompt sets, all of one kind; got {seen}")
    if same_prompts and kinds != {Rollouts}:
        raise DataError("join: same_prompts= is of rollouts")
    joined = JOINS[kinds.pop()](parts)
    return cast(Value, _grouped_by_prompt(joined) if same_prompts else joined)


def join_batches(parts: Sequence[TrainBatch], renumber: bool = True) -> TrainBatch:
    """See `join`; without `renumber` the group numbers stay, so that a group cut in two is whole again."""
    temperatures = sorted({part.temperature for part in parts})
    if len(temperatures) > 1:
        raise DataError(
            f"join: the batches were sampled at temperatures {', '.join(map(str, temperatures))}, and a step trains "
            "at one: train on them one after another"
        )
    joined: dict[str, Any] = {
        name: _column("batches", name, [getattr(part, name) for part in parts])
        for name in ("prompts", "responses", *PER_TOKEN, *PER_ROW)
    }
    joined["columns"] = join_columns([part.columns for part in parts], [part.tokens for part in parts])
    joined["routing"] = join_routing([part.routing for part in parts], [part.lengths for part in parts])
    joined["verdicts"] = joined_verdicts([part.verdicts for part in parts], [len(part) for part in parts])
    for name in KINDS:
        if any(getattr(part, name) is not None for part in parts):
            joined[name] = tuple(own for part in parts for own in getattr(part, name) or ((),) * len(part))
    joined["reshaped_by"] = tuple(dict.fromkeys(option for part in parts for option in part.reshaped_by))
    if renumber:
        joined["group"] = _numbered_anew([part.group for part in parts])
        if joined["pair"] is not None:
            pairs = [part.pair for part in parts if part.pair is not None]
            joined["pair"] = np.where(joined["pair"] < 0, joined["pair"], _numbered_anew(pairs))
    return replace(parts[0], **joined)


def spread(batches: Sequence[TrainBatch], most: int = 16) -> TrainBatch:
    """Return at most so many sequences, at even distances over batches that follow each other."""
    count = sum(map(len, batches))
    chosen = np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int))
    starts = offsets_of([len(batch) for batch in batches])
    rows = [chosen[(chosen >= a) & (chosen < b)] - a for a, b in pairwise(starts)]
    return join_batches([batch.rows(own) for batch, own in zip(batches, rows, strict=True) if len(own)], renumber=False)


def _numbered_anew(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Join numbers of groups so that those of two columns are never the same."""
    local = [np.unique(column, return_inverse=True) for column in columns]
    starts = offsets_of([len(known) for known, _ in local])
    joined = [index + start for (_, index), start in zip(local, starts[:-1], strict=True)]
    return np.concatenate(joined).astype(columns[0].dtype)


def _join_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    tokenizers = list(dict.fromkeys(part.tokenizer for part in parts if part.tokenizer))
    if len(tokenizers) > 1:
        raise DataError(f"join: the rollouts are of different tokenizers: {', '.join(tokenizers)}")
    prompt_starts = list(zip(parts, offsets_of([len(part) for part in parts])[:-1].tolist(), strict=True))
    sample_starts = list(zip(parts, offsets_of([part.samples for part in parts])[:-1].tolist(), strict=True))
    joined: dict[str, Any] = {
        "sampling": _sampling([part.sampling for part in parts]),
        "number": parts[0].number if len({part.number for part in parts}) == 1 else 0,
        "stats": joined_stats([part.stats for part in parts], ("peak_bytes",)),  # one after another: seconds add up
        "tokenizer": parts[0].tokenizer if all(part.tokenizer for part in parts) else "",
        "group": np.concatenate([part.group + np.int32(start) for part, start in prompt_starts]),
        "not_started": tuple(p + start for part, start in prompt_starts for p in part.not_started),
        "channels": _by_name([part.channels for part in parts], [len(part.logprobs) for part in parts]),
        "columns": join_columns([part.columns for part in parts], [len(part.logprobs) for part in parts]),
        "components": _by_name([part.components for part in parts], [part.samples for part in parts]),
        "reward_errors": RewardErrors(
            tuple(replace(e, index=e.index + start) for part, start in sample_starts for e in part.reward_errors)
        ),
        "notes": tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        "routing": join_routing(
            [part.routing for part in parts], [part.prompt_ids.lengths[part.group] + part.lengths for part in parts]
        ),
    }
    for name in (field.name for field in fields(Rollouts) if field.name not in joined):
        values = [getattr(part, name) for part in parts]
        if name in ABSENT and any(map(_is_known, values)):
            values = [v if _is_known(v) else ABSENT[name](part) for part, v in zip(parts, values, strict=True)]
        joined[name] = _column("rollouts", name, values)
    return replace(parts[0], **joined)


def _grouped_by_prompt(rollouts: Rollouts) -> Rollouts:
    """Make groups of equal prompts one group, where the first of them stood; samples stay in their order."""
    copies: dict[str, list[int]] = {}
    for i, p in enumerate(rollouts.prompts):
        told = [p.content, p.label, dict(p.meta), [one.digest for one in p.media]]
        copies.setdefault(plain.dumps(told, f"prompt {i}"), []).append(i)
    index = {p: i for i, same in enumerate(copies.values()) for p in same}
    group = np.array([index[p] for p in rollouts.group.tolist()], np.int32)
    rows = []
    for same in copies.values():
        known = [p for p in same if len(rollouts.prompt_ids[p])] or same[:1]  # one that nobody started has no tokens
        if any(not np.array_equal(rollouts.prompt_ids[p], rollouts.prompt_ids[known[0]]) for p in known):
            prompt = rollouts.prompts[known[0]].text[:40]
            raise DataError(f"join: {prompt!r} has other token ids in one of the rollouts: join without same_prompts")
        rows.append(known[0])
    return replace(
        taking.samples(rollouts, np.argsort(group, kind="stable")),
        prompts=tuple(rollouts.prompts[same[0]] for same in copies.values()),
        prompt_ids=rollouts.prompt_ids.take(rows),
        group=np.sort(group),
        not_started=tuple(i for i, same in enumerate(copies.values()) if set(rollouts.not_started).issuperset(same)),
    )


def _join_sets(parts: Sequence[PromptSet]) -> PromptSet:
    lengths = [part.lengths for part in parts if part.lengths is not None]
    names, limits = {part.name for part in parts}, {part.max_prompt_tokens for part in parts}
    return PromptSet(
        prompts=tuple(prompt for part in parts for prompt in part),
        name=names.pop() if len(names) == 1 else "",
        lengths=np.concatenate(lengths) if len(lengths) == len(parts) else None,
        max_prompt_tokens=limits.pop() if len(limits) == 1 else None,
        too_long=tuple(long for part in parts for long in part.too_long),
    )


JOINS: dict[type, Callable[[Sequence[Any]], Any]] = {
    Rollouts: _join_rollouts,
    TrainBatch: join_batches,
    PromptSet: _join_sets,
}


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, tuple) and not value)


def _column(what: str, name: str, values: Sequence[Any]) -> Any:
    """One field over all parts; None where none of them has it."""
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        raise DataError(f"join: only some of the {what} have {name}")
    if isinstance(values[0], Ragged):
        return Ragged.joined(values)
    if isinstance(values[0], np.ndarray):
        return np.concatenate([np.asarray(value) for value in values])
    return tuple(one for value in values for one in value)


def _by_name(values: Sequence[Mapping[str, np.ndarray]], lengths: Sequence[int]) -> dict[str, np.ndarray]:
    """Columns by name, NaN in the parts that have none of that name."""
    unknown = [np.full(count, np.nan, np.float32) for count in lengths]
    return {
        name: np.concatenate([np.asarray(value.get(name, nan)) for value, nan in zip(values, unknown, strict=True)])
        for name in dict.fromkeys(name for value in values for name in value)
    }


def _sampling(options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in options for name in one):
        values = [one.get(name, DEFAULTS.get(name)) for one in options]
        if all(value == values[0] for value in values):
            joined[name] = values[0]
        elif name not in ONLY_LENGTH:
            different = " and ".join(dict.fromkeys(map(str, values)))
            raise DataError(f"join: {name} is {different}: log-probs of different distributions")
    return joined
