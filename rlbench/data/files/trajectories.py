"""Trajectories as JSON for other tools: one object per completion, its turns as messages.

    {"schema": "rlbench.trajectories/1",
     "sampling": {…}, "number": 7, "tokenizer": "…",
     "trajectories": [
       {"prompt_index": 3, "sample_index": 0,
        "messages": [{"role": "user", "content": "sort 312 :"}, {"role": "assistant", "content": "123"}],
        "prompt_token_ids": [ … ], "token_ids": [ … ],          # of the last message, never re-tokenised
        "channels": {"sampler_logprob": [ … ], "advantage": [ … ]},   # one number per token id; null: not known
        "reward": 1.0,                                          # null where not scored
        "finish_reason": "stop", "weight_version": 41,          # "stop", "length" or "abort"
        "label": "123", "meta": {}}]}

With an environment `messages` has all turns, and there are `mask`, `turns`, `turn_rewards` and `info`
(`rlbench.data.rollouts.turns`). The first completion of a prompt with images has them as `images`, data URLs, for the
messages' parts `{"type": "image"}`, likewise `videos` for `{"type": "video"}` and `sounds` for `{"type": "audio"}`;
each completion those that an environment showed, as `observed_images`, and the tokens at which they begin as
`observed_images_at`. A prompt given as token ids is a user message with `content` null. What JSON has no form for is
marked as in `data.base.plain`.
A path that ends in `.jsonl` gets one object per line, without the frame.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.files import written_aside
from rlbench.data.base.plain import to_plain
from rlbench.data.files.export import sample_index
from rlbench.data.prompts.placing import KINDS
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.rollouts.channels import all_channels
from rlbench.data.rollouts.jobs import FINISH_REASONS
from rlbench.data.rollouts.turns import conversation

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts

SCHEMA = "rlbench.trajectories/1"


def write_json(rollouts: Rollouts, path: str | Path) -> Path:
    """Write all completions; see the top of this file."""
    lines = Path(path).suffix == ".jsonl"
    with written_aside(path) as aside, open(aside, "w", encoding="ascii", newline="\n") as file:
        if not lines:
            frame = {
                "schema": SCHEMA,
                "sampling": to_plain(rollouts.sampling, "the sampling options"),
                "number": rollouts.number,
                "tokenizer": rollouts.tokenizer,
            }
            file.write(_dumps(frame)[:-1] + ', "trajectories": [\n')
        for i, one in enumerate(trajectories(rollouts)):
            file.write("" if i == 0 else "\n" if lines else ",\n")
            file.write(_dumps(one))
        file.write("\n" if lines else "\n]}\n")
    return Path(path).expanduser()


def trajectories(rollouts: Rollouts) -> Iterator[dict[str, Any]]:
    """Each completion as one dict of JSON types, in `.flat` order."""
    which = sample_index(rollouts)
    channels = {name: rollouts.responses.with_values(v) for name, v in all_channels(rollouts).items()}
    for i in range(rollouts.samples):
        p = int(rollouts.group[i])
        prompt = rollouts.prompts[p]
        info = rollouts.infos[i] if rollouts.infos else {}
        yield {
            "prompt_index": p,
            "sample_index": int(which[i]),
            "messages": to_plain(conversation(prompt, info, rollouts.texts[i]), f"prompt {p}"),
            "prompt_token_ids": rollouts.prompt_ids[p].tolist(),
            "token_ids": rollouts.responses[i].tolist(),
            "channels": {name: _numbers(rows[i]) for name, rows in channels.items()},
            "reward": None if rollouts.rewards is None else _number(rollouts.rewards[i]),
            "reward_components": {name: _number(values[i]) for name, values in rollouts.components.items()},
            "finish_reason": FINISH_REASONS[rollouts.finish[i]],
            "weight_version": int(rollouts.versions[i]),
            "label": to_plain(prompt.label, f"the label of prompt {p}"),
            "meta": to_plain(dict(prompt.meta), f"the meta data of prompt {p}"),
            **({} if which[i] else _media(prompt)),
            **_turns(rollouts, i),
        }


def _media(prompt: Prompt) -> dict[str, list[str]]:
    """Return what a prompt has of images, videos and sounds, as data URLs by kind."""
    return {name: [one.data_url for one in held] for name in KINDS if (held := getattr(prompt, name))}


def _number(value: float) -> float | None:
    """As JSON holds it: a reward whose scoring failed is NaN."""
    return float(value) if np.isfinite(value) else None


def _turns(rollouts: Rollouts, i: int) -> dict[str, Any]:
    """What an environment adds; nothing without one."""
    if rollouts.mask is None or rollouts.turns is None or rollouts.turn_rewards is None:
        return {}
    start, stop = rollouts.responses.offsets[i : i + 2]
    info = dict(rollouts.infos[i]) if rollouts.infos else {}
    seen = rollouts.observed_images[i] if rollouts.observed_images else ()
    shown = {"observed_images": [one.data_url for one in seen], "observed_images_at": [one.at for one in seen]}
    return {
        **(shown if seen else {}),
        "mask": rollouts.mask[start:stop].astype(int).tolist(),
        "turns": rollouts.turns[start:stop].tolist(),
        "turn_rewards": _numbers(rollouts.turn_rewards[i]),
        "info": to_plain({name: value for name, value in info.items() if name != "messages"}, f"the info of {i}"),
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    """Floats as short as they read back equal; JSON knows neither NaN nor infinity."""
    short = [float(str(v)) for v in values.astype(np.float32)]
    return [v if ok else None for v, ok in zip(short, np.isfinite(values).tolist(), strict=True)]


_dumps = partial(json.dumps, allow_nan=False)
