"""Rollouts as tables: a pandas frame to work on, and one Parquet file that gives the same rollouts back.

The file has one row per completion, readable with any tool:

    prompt_index, sample_index   int32   which prompt, which of its completions
    prompt                       text    the prompt for a reader
    text                         text    the completion; null in the row of a prompt that has none
    reward                       float64 null where not scored, NaN where scoring failed
    component.NAME               float64 what the reward was made of; further: reward_seconds, reward_error(_line)
    length, finish_reason, weight_version
    env_reward, info_json        float64, text: of an environment (`rollouts.turns`); and as lists, mask (bool, over
                                 tokens), turn (int32, over tokens), turn_reward (float64, over turns)
    token_ids                    list<int32>
    sampler_logprob              list<float32>, nats; likewise one column `channel.NAME` per further channel
    prompt_token_ids             list<int32>
    prompt_json, label_json, meta_json      the prompt as it was given (`rlbench.data.base.plain`)

What belongs to the whole (sampling options, number, statistics, tokenizer) stands in the schema's metadata.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base import plain
from rlbench.data.base.arrow import list_column, ragged_column, read_own, write_own
from rlbench.data.base.optional import needed
from rlbench.data.files.export_turns import turn_columns, turn_fields
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.rollouts.channels import SAMPLER, all_channels
from rlbench.data.rollouts.jobs import FINISH_REASONS
from rlbench.data.rollouts.scoring import RewardError, RewardErrors
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts

FORMAT = 1
KEY = b"rlbench.rollouts"
CHANNEL = "channel."
COMPONENT = "component."


def frame(rollouts: Rollouts) -> Any:
    """A pandas DataFrame, one row per completion in `.flat` order.

    Columns: `prompt_index`, `sample_index`, `prompt` (for a reader), `label`, `text`, `reward` (NaN before scoring),
    `length` (tokens), `finish_reason`, `weight_version`, `token_ids`, and each channel as one array per row
    (`sampler_logprob`, `advantage`, …). Where the reward told: `component.NAME`, `reward_seconds`, `reward_error`.
    Where there was an environment: `env_reward`, `turn_rewards`, `info`.
    """
    pandas = needed("pandas", "to_pandas()")
    prompts = [rollouts.prompts[p] for p in rollouts.group]
    unscored = np.full(rollouts.samples, np.nan)
    columns = {
        "prompt_index": rollouts.group,
        "sample_index": sample_index(rollouts),
        "prompt": [p.text for p in prompts],
        "label": [p.label for p in prompts],
        "text": list(rollouts.texts),
        "reward": unscored if rollouts.rewards is None else rollouts.rewards,
        "length": rollouts.lengths,
        "finish_reason": [FINISH_REASONS[f] for f in rollouts.finish],
        "weight_version": rollouts.versions,
        "token_ids": list(rollouts.responses),
    }
    columns |= _scoring_columns(rollouts)
    for name, values in all_channels(rollouts).items():
        columns[CHANNEL + name if name in columns else name] = list(rollouts.responses.with_values(values))
    if rollouts.turn_rewards is not None:
        columns |= {"env_reward": rollouts.env_rewards, "turn_rewards": list(rollouts.turn_rewards)}
        columns["info"] = list(rollouts.infos)
    return pandas.DataFrame(columns)


def write_parquet(rollouts: Rollouts, path: str | Path) -> Path:
    """Write a Parquet file; see the top of this file."""
    needed("pyarrow", "to_parquet()")
    table, facts = _table(rollouts)
    return write_own(table, path, KEY, facts)


def read_parquet(path: str | Path) -> Rollouts:
    """Read what `write_parquet` wrote."""
    table, facts = read_own(path, KEY, FORMAT, "rollouts.to_parquet()")
    try:
        return _rollouts(table, facts)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{path} was changed since rollouts.to_parquet() wrote it: {error}") from error


def sample_index(rollouts: Rollouts) -> np.ndarray:
    """Which of its prompt's completions each one is, (N,) int32."""
    firsts = np.searchsorted(rollouts.group, np.arange(len(rollouts)))
    return (np.arange(rollouts.samples) - firsts[rollouts.group]).astype(np.int32)


def _table(rollouts: Rollouts) -> tuple[Any, dict[str, Any]]:
    """Completions in order, then one row for each prompt without any; and the facts of the whole."""
    import pyarrow as pa

    bare = np.setdiff1d(np.arange(len(rollouts)), rollouts.group)
    none = [None] * len(bare)
    prompt_of = np.concatenate([rollouts.group, bare]).astype(np.int32)
    contents = [
        (
            prompt.text,
            plain.dumps(prompt.content, f"prompt {i}"),
            plain.dumps(prompt.label, f"the label of prompt {i}"),
            plain.dumps(dict(prompt.meta), f"the meta data of prompt {i}"),
        )
        for i, prompt in enumerate(rollouts.prompts)
    ]
    rewards = [None] * rollouts.samples if rollouts.rewards is None else rollouts.rewards.tolist()
    columns = {
        "prompt_index": pa.array(prompt_of, pa.int32()),
        "sample_index": pa.array([*sample_index(rollouts).tolist(), *none], pa.int32()),
        "prompt": _texts([contents[p][0] for p in prompt_of], "the text of prompt", lossy=True),
        "text": _texts([*rollouts.texts, *none], "completion"),
        "reward": pa.array([*rewards, *none], pa.float64()),
        "length": pa.array([*rollouts.lengths.tolist(), *none], pa.int64()),
        "finish_reason": pa.array([*(FINISH_REASONS[f] for f in rollouts.finish), *none], pa.string()),
        "weight_version": pa.array([*rollouts.versions.tolist(), *none], pa.int64()),
        "token_ids": list_column(rollouts.responses, len(bare), pa.int32()),
    }
    for name, values in all_channels(rollouts).items():
        if name == SAMPLER or name in rollouts.channels:
            column = SAMPLER if name == SAMPLER else CHANNEL + name
            columns[column] = list_column(rollouts.responses.with_values(values), len(bare), pa.float32())
    columns |= turn_columns(rollouts, len(bare))
    for name, told in _scoring_columns(rollouts).items():
        kind = pa.large_string() if told.dtype == object else pa.float64()
        columns[name] = pa.array([*told.tolist(), *none], kind)
    columns["prompt_token_ids"] = list_column(rollouts.prompt_ids.take(prompt_of), 0, pa.int32())
    for k, name in enumerate(("prompt_json", "label_json", "meta_json"), start=1):
        columns[name] = pa.array([contents[p][k] for p in prompt_of], pa.large_string())
    facts = {
        "format": FORMAT,
        "number": rollouts.number,
        "prompts": len(rollouts),
        "samples": rollouts.samples,
        "scored": rollouts.rewards is not None,
        "not_started": [int(p) for p in rollouts.not_started],
        "sampling": plain.to_plain(rollouts.sampling, "the sampling options"),
        "stats": plain.to_plain(rollouts.stats, "stats"),
        "channels": list(rollouts.channels),
        "tokenizer": rollouts.tokenizer,
        "components": list(rollouts.components),
        "reward_errors": [[e.index, e.prompt, e.error, e.line] for e in rollouts.reward_errors],
        "timed": rollouts.reward_seconds is not None,
        "turns": rollouts.mask is not None,
        "notes": list(rollouts.notes),
    }
    return pa.table(columns), facts


def _rollouts(table: Any, facts: dict[str, Any]) -> Rollouts:
    from rlbench.data.rollouts.rollouts import Rollouts

    samples = facts["samples"]
    rows = table.slice(0, samples)
    prompt_of = table["prompt_index"].to_numpy()
    first = np.full(facts["prompts"], -1)
    first[prompt_of[::-1]] = np.arange(len(prompt_of))[::-1]
    if (first < 0).any():
        raise ValueError(f"prompt {int(np.argmax(first < 0))} has no row")
    prompts_table = table.take(first)
    cells = [prompts_table[n].to_pylist() for n in ("prompt_json", "label_json", "meta_json")]
    finish = {name: i for i, name in enumerate(FINISH_REASONS)}
    return Rollouts(
        prompts=tuple(Prompt(*map(plain.loads, row)) for row in zip(*cells, strict=True)),
        prompt_ids=ragged_column(prompts_table["prompt_token_ids"], np.int32),
        responses=ragged_column(rows["token_ids"], np.int32),
        group=rows["prompt_index"].to_numpy().astype(np.int32),
        finish=np.array([finish[f] for f in rows["finish_reason"].to_pylist()], np.int8),
        versions=rows["weight_version"].to_numpy().astype(np.int64),
        texts=tuple(rows["text"].to_pylist()),
        sampling=plain.from_plain(facts["sampling"]),
        rewards=rows["reward"].to_numpy().astype(np.float64) if facts["scored"] else None,
        number=facts["number"],
        not_started=tuple(facts["not_started"]),
        stats=plain.from_plain(facts["stats"]),
        notes=tuple(facts.get("notes", ())),
        channels={name: ragged_column(rows[CHANNEL + name], np.float32).values for name in facts["channels"]},
        tokenizer=facts["tokenizer"],
        components={name: rows[COMPONENT + name].to_numpy().astype(np.float64) for name in facts.get("components", ())},
        reward_seconds=rows["reward_seconds"].to_numpy().astype(np.float64) if facts.get("timed") else None,
        reward_errors=RewardErrors(RewardError(*error) for error in facts.get("reward_errors", ())),
        **turn_fields(rows, ragged_column(rows[SAMPLER], np.float32).values, facts.get("turns", False)),
    )


def _scoring_columns(rollouts: Rollouts) -> dict[str, np.ndarray]:
    """What scoring told beside the rewards, (N,) each: float64, or object for texts (None where nothing failed)."""
    columns: dict[str, np.ndarray] = {COMPONENT + name: v for name, v in rollouts.components.items()}
    if rollouts.reward_seconds is not None:
        columns["reward_seconds"] = rollouts.reward_seconds
    if rollouts.reward_errors:
        for name, what in (("reward_error", "error"), ("reward_error_line", "line")):
            columns[name] = np.full(rollouts.samples, None, object)
            columns[name][[e.index for e in rollouts.reward_errors]] = [
                getattr(e, what).encode("utf-8", "replace").decode() for e in rollouts.reward_errors
            ]
    return columns


def _texts(values: list[str | None], what: str, lossy: bool = False) -> Any:
    """A text column. Lone surrogates have no UTF-8: replaced if the exact text stands elsewhere, else refused."""
    import pyarrow as pa

    if lossy:
        values = [None if v is None else v.encode("utf-8", "replace").decode() for v in values]
    try:
        return pa.array(values, pa.large_string())
    except UnicodeEncodeError:
        bad = next(i for i, v in enumerate(values) if any("\ud800" <= c <= "\udfff" for c in v or ""))
        raise DataError(
            f"{what} {bad} holds a lone surrogate, which no file can hold as text: replace it first"
        ) from None
