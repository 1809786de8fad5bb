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
    prompt_images  list<binary>  files of its images, in the first row of each prompt; where any prompt has images
    prompt_videos, prompt_sounds files of its videos and sounds, likewise; where a video asks for other frames than its
                                 checkpoint's processor takes, those options in `prompt_videos_sampling`
    observed_images              files of those an environment showed, and as `observed_images_at` the tokens where they
                                 begin; where there are any
    routing        list<int16>   experts of each token of prompt and response, layer by layer; where they are known

What belongs to the whole (sampling options, number, statistics, tokenizer) stands in the schema's metadata.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base import plain
from rlbench.data.base.arrow import (
    list_column,
    ragged_column,
    read_own,
    read_wide,
    read_wide_column,
    wide_column,
    wide_columns,
    write_own,
)
from rlbench.data.base.drawing import needed
from rlbench.data.prompts.image_columns import image_columns, media_columns, read_images, read_media
from rlbench.data.prompts.placing import KINDS
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.rollouts.channels import SAMPLER, all_channels
from rlbench.data.rollouts.jobs import FINISH_REASONS
from rlbench.data.rollouts.scoring import RewardError, RewardErrors
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.data.prompts.images import PlacedImage
    from rlbench.data.rollouts.rollouts import Rollouts

FORMAT = 1
CHANNEL = "channel."
COMPONENT = "component."
IMAGES, OBSERVED = "prompt_images", "observed_images"
LISTED = {"prompt_videos": "videos", "prompt_sounds": "sounds"}


def frame(rollouts: Rollouts) -> Any:
    """A pandas DataFrame, one row per completion in `.flat` order, with each channel as one array per row."""
    pandas = needed("pandas", "to_pandas()")
    prompts = [rollouts.prompts[p] for p in rollouts.group]
    columns = {
        "prompt_index": rollouts.group,
        "sample_index": sample_index(rollouts),
        "prompt": [p.text for p in prompts],
        "label": [p.label for p in prompts],
        "text": list(rollouts.texts),
        "reward": np.full(rollouts.samples, np.nan) if rollouts.rewards is None else rollouts.rewards,
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
        columns["answer"] = [rollout.answer for rollout in rollouts.flat]
    return pandas.DataFrame(columns)


def write_parquet(rollouts: Rollouts, path: str | Path) -> Path:
    """Write a Parquet file; see the top of this file."""
    needed("pyarrow", "to_parquet()")
    table, facts = _table(rollouts)
    return write_own(table, path, "rollouts", facts)


def read_parquet(path: str | Path) -> Rollouts:
    """Read what `write_parquet` wrote."""
    table, facts = read_own(path, "rollouts", FORMAT)
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
    contents = {
        "prompt_json": [plain.dumps(one.content, f"prompt {i}") for i, one in enumerate(rollouts.prompts)],
        "label_json": [plain.dumps(one.label, f"the label of prompt {i}") for i, one in enumerate(rollouts.prompts)],
        "meta_json": [plain.dumps(dict(one.meta), f"the meta of prompt {i}") for i, one in enumerate(rollouts.prompts)],
    }
    rewards = [None] * rollouts.samples if rollouts.rewards is None else rollouts.rewards.tolist()
    columns = {
        "prompt_index": pa.array(prompt_of, pa.int32()),
        "sample_index": pa.array([*sample_index(rollouts).tolist(), *none], pa.int32()),
        "prompt": pa.array([_utf8(rollouts.prompts[p].text) for p in prompt_of], pa.large_string()),
        "text": _texts(rollouts, len(bare)),
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
    wide, of_columns = wide_columns(rollouts.columns, rollouts.responses, len(bare))
    columns |= wide | _turn_columns(rollouts, len(bare))
    routed = None
    if rollouts.routing is not None:
        columns["routing"], routed = wide_column(rollouts.routing, len(bare))
    for name, values in _scoring_columns(rollouts).items():
        kind = pa.large_string() if values.dtype == object else pa.float64()
        columns[name] = pa.array([*values.tolist(), *none], kind)
    columns["prompt_token_ids"] = list_column(rollouts.prompt_ids.take(prompt_of), 0, pa.int32())
    for name, texts in contents.items():
        columns[name] = pa.array([texts[p] for p in prompt_of], pa.large_string())
    columns |= _image_columns(rollouts, prompt_of)
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
        "columns": of_columns,
        "tokenizer": rollouts.tokenizer,
        "components": list(rollouts.components),
        "reward_errors": [[e.index, e.prompt, e.error, e.line] for e in rollouts.reward_errors],
        "timed": rollouts.reward_seconds is not None,
        "turns": rollouts.mask is not None,
        "notes": list(rollouts.notes),
        "routing": routed,
    }
    return pa.table(columns), facts


def _rollouts(table: Any, facts: dict[str, Any]) -> Rollouts:
    from rlbench.data.rollouts.rollouts import Rollouts

    rows = table.slice(0, facts["samples"])
    prompt_of = table["prompt_index"].to_numpy()
    first = np.full(facts["prompts"], -1)
    first[prompt_of[::-1]] = np.arange(len(prompt_of))[::-1]
    if (first < 0).any():
        raise ValueError(f"prompt {int(np.argmax(first < 0))} has no row")
    prompts_table = table.take(first)
    media: dict[str, Any] = {"images": read_images(prompts_table, IMAGES)}
    media |= {name: read_media(prompts_table, column, KINDS[name]) for column, name in LISTED.items()}
    cells = [prompts_table[n].to_pylist() for n in ("prompt_json", "label_json", "meta_json")]
    told = [map(plain.loads, row) for row in zip(*cells, strict=True)]
    finish = {name: i for i, name in enumerate(FINISH_REASONS)}
    return Rollouts(
        prompts=tuple(
            Prompt(content, label, meta, **{name: media[name][p] for name in KINDS})
            for p, (content, label, meta) in enumerate(told)
        ),
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
        columns=read_wide(rows, facts.get("columns", {})),
        tokenizer=facts["tokenizer"],
        components={name: rows[COMPONENT + name].to_numpy().astype(np.float64) for name in facts.get("components", ())},
        reward_seconds=rows["reward_seconds"].to_numpy().astype(np.float64) if facts.get("timed") else None,
        reward_errors=RewardErrors(tuple(RewardError(*error) for error in facts.get("reward_errors", ()))),
        observed_images=_observed(rows),
        routing=read_wide_column(rows["routing"], facts["routing"]) if facts.get("routing") else None,
        **_turn_fields(rows, ragged_column(rows[SAMPLER], np.float32).values, facts.get("turns", False)),
    )


def _image_columns(rollouts: Rollouts, prompt_of: np.ndarray) -> dict[str, Any]:
    """`prompt_images` and what is `LISTED`, once for each prompt, and `observed_images`; none where there are none."""
    columns: dict[str, Any] = {}
    first = set(np.unique(prompt_of, return_index=True)[1].tolist())
    if any(prompt.images for prompt in rollouts.prompts):
        held = [rollouts.prompts[p].images if row in first else None for row, p in enumerate(prompt_of)]
        columns[IMAGES] = image_columns(IMAGES, held)[IMAGES]
    for column, name in LISTED.items():
        if any(getattr(prompt, name) for prompt in rollouts.prompts):
            prompts = [rollouts.prompts[p] if row in first else None for row, p in enumerate(prompt_of)]
            columns |= media_columns(column, [prompt and getattr(prompt, name) for prompt in prompts])
    if any(rollouts.observed_images):
        bare = [None] * (len(prompt_of) - rollouts.samples)
        columns |= image_columns(OBSERVED, [*rollouts.observed_images, *bare])
    return columns


def _observed(rows: Any) -> tuple[tuple[PlacedImage, ...], ...]:
    return tuple(read_images(rows, OBSERVED)) if OBSERVED in rows.column_names else ()  # type: ignore[arg-type]


def _turn_columns(rollouts: Rollouts, nulls: int) -> dict[str, Any]:
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


def _turn_fields(rows: Any, logprobs: np.ndarray, there: bool) -> dict[str, Any]:
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


def _scoring_columns(rollouts: Rollouts) -> dict[str, np.ndarray]:
    """What scoring told beside the rewards, (N,) each: float64, or object for texts (None where nothing failed)."""
    columns: dict[str, np.ndarray] = {COMPONENT + name: v for name, v in rollouts.components.items()}
    if rollouts.reward_seconds is not None:
        columns["reward_seconds"] = rollouts.reward_seconds
    if rollouts.reward_errors:
        for name, what in (("reward_error", "error"), ("reward_error_line", "line")):
            columns[name] = np.full(rollouts.samples, None, object)
            for error in rollouts.reward_errors:
                columns[name][error.index] = _utf8(getattr(error, what))
    return columns


def _texts(rollouts: Rollouts, nulls: int) -> Any:
    """The completions' texts. A lone surrogate has no UTF-8, and no other column has the exact text."""
    import pyarrow as pa

    for i, text in enumerate(rollouts.texts):
        if _utf8(text) != text:
            raise DataError(f"completion {i} holds a lone surrogate, which no file can hold as text: replace it first")
    return pa.array([*rollouts.texts, *[None] * nulls], pa.large_string())


def _utf8(text: str) -> str:
    """The text without its lone surrogates, which have no UTF-8."""
    return text.encode("utf-8", "replace").decode()
