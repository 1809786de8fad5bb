"""Rollouts of several calls as one value: written over their fields, by what each of them is counted in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base import plain
from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.data.rollouts.merging import joined_stats
from rlbench.data.rollouts.scoring import RewardErrors
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts

ONLY_LENGTH = ("max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "seed")
"""Sampling options that do not change what a log-prob is of."""
UNSAID: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What an option is where nobody said it."""
ABSENT: dict[str, Callable[[Rollouts], Any]] = {
    "mask": lambda part: np.ones(len(part.logprobs), bool),
    "turns": lambda part: np.zeros(len(part.logprobs), np.int32),
    "turn_rewards": lambda part: Ragged(np.full(part.samples, np.nan), np.arange(part.samples + 1)),
    "env_rewards": lambda part: np.full(part.samples, np.nan),
    "reward_seconds": lambda part: np.full(part.samples, np.nan),
    "infos": lambda part: ({},) * part.samples,
}
"""What stands for a field that one of the rollouts lacks: all tokens sampled in one turn, a reward not known."""
SCORED_NOT: dict[str, Any] = {"components": {}, "reward_seconds": None, "reward_errors": RewardErrors()}
"""What belongs to rewards, where there are none."""


def join_rollouts(parts: Sequence[Rollouts], same_prompts: bool, drop_unknown: bool) -> Rollouts:
    """See `rlbench.data.join`."""
    if len({part.rewards is None for part in parts}) > 1:
        if not drop_unknown:
            raise DataError(
                "join: only some of the rollouts have rewards: score them all, or join(…, drop_unknown=True)"
            )
        parts = [replace(part, rewards=None, **SCORED_NOT) for part in parts]
    known = list(dict.fromkeys(part.tokenizer for part in parts if part.tokenizer))
    if len(known) > 1:
        raise DataError(f"join: the rollouts are of different tokenizers: {', '.join(known)}")
    joined: dict[str, Any] = {
        "sampling": _sampling([part.sampling for part in parts]),
        "number": parts[0].number if len({part.number for part in parts}) == 1 else 0,
        "stats": joined_stats([part.stats for part in parts], ("peak_bytes",)),  # one after another: seconds add up
        "tokenizer": parts[0].tokenizer if all(part.tokenizer for part in parts) else "",
        "group": _shifted(parts, [part.group for part in parts], np.int32),
        "not_started": tuple(_shifted(parts, [np.array(part.not_started, int) for part in parts], int).tolist()),
        "channels": _named([part.channels for part in parts], [len(part.logprobs) for part in parts]),
        "components": _named([part.components for part in parts], [part.samples for part in parts]),
        "reward_errors": RewardErrors(
            replace(error, index=error.index + int(start))
            for part, start in zip(parts, offsets_of([part.samples for part in parts]), strict=False)
            for error in part.reward_errors
        ),
        "notes": tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    }
    for field in fields(parts[0]):
        if field.name not in joined:
            joined[field.name] = _column(parts, field.name)
    whole = replace(parts[0], **joined)
    return _merged(whole) if same_prompts else whole


def _column(parts: Sequence[Rollouts], name: str) -> Any:
    """A field that is counted in prompts, samples or tokens, over all parts; None or empty where none has it."""
    values = [getattr(part, name) for part in parts]
    if name in ABSENT:
        lacking = [value is None or (isinstance(value, tuple) and not value) for value in values]
        if all(lacking):
            return values[0]
        values = [
            ABSENT[name](part) if lacks else value for part, value, lacks in zip(parts, values, lacking, strict=True)
        ]
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        raise DataError(f"join: only some of the rollouts have {name}")
    if isinstance(values[0], Ragged):
        return joined_ragged(values)
    if isinstance(values[0], np.ndarray):
        return np.concatenate([np.asarray(value) for value in values])
    return tuple(one for value in values for one in value)


def joined_ragged(parts: Sequence[Ragged]) -> Ragged:
    """The rows of all, in order."""
    lengths = np.concatenate([part.lengths for part in parts])
    return Ragged(np.concatenate([part.values for part in parts]), offsets_of(lengths))


def _named(values: Sequence[Mapping[str, np.ndarray]], lengths: Sequence[int]) -> dict[str, np.ndarray]:
    """Columns by name, NaN in the parts that have none of that name."""
    names = dict.fromkeys(name for value in values for name in value)
    unknown = [np.full(count, np.nan, np.float32) for count in lengths]
    return {
        name: np.concatenate([np.asarray(value.get(name, nan)) for value, nan in zip(values, unknown, strict=True)])
        for name in names
    }


def _shifted(parts: Sequence[Rollouts], indices: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Prompt indices of each part, counted over all parts."""
    starts = offsets_of([len(part) for part in parts])
    return np.concatenate([(one + start).astype(dtype) for one, start in zip(indices, starts, strict=False)])


def _sampling(options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in options for name in one):
        values = [one.get(name, UNSAID.get(name)) for one in options]
        if all(value == values[0] for value in values):
            found[name] = values[0]
        elif name not in ONLY_LENGTH:
            different = " and ".join(dict.fromkeys(map(str, values)))
            raise DataError(
                f"join: the rollouts were sampled with {name} {different}: their log-probs are "
                "of different distributions"
            )
    return found


def _merged(whole: Rollouts) -> Rollouts:
    """Groups of equal prompts as one group, where the first of them stood; samples in the order they had."""
    keys = [
        plain.dumps([prompt.content, prompt.label, dict(prompt.meta)], f"prompt {i}")
        for i, prompt in enumerate(whole.prompts)
    ]
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    copies: dict[int, list[int]] = {}
    for p, key in enumerate(keys):
        copies.setdefault(index[key], []).append(p)
    group = np.array([index[keys[p]] for p in whole.group.tolist()], np.int32)
    taken = whole._take(np.argsort(group, kind="stable"))
    firsts = [same[0] for same in copies.values()]
    not_started = set(whole.not_started)
    return replace(
        taken,
        prompts=tuple(whole.prompts[p] for p in firsts),
        prompt_ids=whole.prompt_ids.take([_with_tokens(whole, same) for same in copies.values()]),
        group=np.sort(group),
        not_started=tuple(i for i, same in copies.items() if not_started.issuperset(same)),
    )


def _with_tokens(whole: Rollouts, same: Sequence[int]) -> int:
    """Of equal prompts one whose token ids are known; a prompt that nobody started has none."""
    known = [p for p in same if len(whole.prompt_ids[p])]
    for p in known[1:]:
        if not np.array_equal(whole.prompt_ids[p], whole.prompt_ids[known[0]]):
            raise DataError(
                f"join: prompt {whole.prompts[p].text[:40]!r} has other token ids in one of the rollouts (another chat "
                "template or tokenizer?): join without same_prompts"
            )
    return known[0] if known else same[0]
