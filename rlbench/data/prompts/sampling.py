"""Sampling options by vLLM's names: how people give them, which reshape the distribution; the seed of each sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DEFAULT_MAX_TOKENS = 16
"""Tokens of a completion where nobody said: vLLM's default."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "bad_words": (None, [], ()),
    "allowed_token_ids": (None,),
    "logit_bias": (None, {}),
    "structured_outputs": (None,),
    "first_token_temperature": (None,),
}
"""Sampling options that reshape the distribution, with values that do not; a trainer knows the temperature alone."""
DERIVED = ("output_text_buffer_length",)
"""Fields that vLLM's SamplingParams sets itself."""


def sampling_options(given: Any) -> dict[str, Any]:
    """Return sampling options as a dict of one's own, from None, a mapping, or an object with them as attributes.

    Of vLLM's `SamplingParams`, whose fields all have defaults, those that differ from them, and `max_tokens` always.
    """
    if given is None or isinstance(given, Mapping):
        options = dict(given or {})
    elif hasattr(given, "__struct_fields__"):
        defaults = type(given)()
        names = [name for name in given.__struct_fields__ if name[0] != "_" and name not in DERIVED]
        options = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(defaults, name)}
        options = {name: value for name, value in options.items() if value is not None}
        options["max_tokens"] = given.max_tokens
    else:
        options = {name: value for name, value in vars(given).items() if value is not None and name[0] != "_"}
    if options.get("logprobs") in (0, 1):  # the sampled token's always comes
        del options["logprobs"]
    grammar = options.get("structured_outputs")
    if dataclasses.is_dataclass(grammar):  # vLLM's StructuredOutputsParams
        options["structured_outputs"] = {
            f.name: value
            for f in dataclasses.fields(grammar)
            if (value := getattr(grammar, f.name)) and f.name[0] != "_"
        }
    return options


def reshaping(sampling: Mapping[str, Any]) -> list[str]:
    """Names of the options that make the sampler draw from another distribution than the trainer's."""
    return [name for name, harmless in NEUTRAL.items() if name in sampling and sampling[name] not in harmless]


def reshaped_by(sampling: Mapping[str, Any]) -> tuple[str, ...]:
    """Those options as they are typed."""
    return tuple(f"{name}={sampling[name]!r}" for name in reshaping(sampling))


def notes_of(sampling: Mapping[str, Any], truncated: Sequence[int] | np.ndarray, samples: int) -> tuple[str, ...]:
    """What a reader of `samples` completions has to know of how they were drawn; `truncated`: lengths of those cut."""
    notes = [] if sampling.get("temperature") == 0 else reshaped_notes(reshaped_by(sampling))
    cut = int((np.asarray(truncated) >= DEFAULT_MAX_TOKENS).sum())
    if "max_tokens" not in sampling and cut:
        end = f"max_tokens={DEFAULT_MAX_TOKENS}, the default: pass max_tokens=…"
        notes = [f"{cut} of {samples} completions end at {end}", *notes]
    return tuple(notes)


def reshaped_notes(options: tuple[str, ...]) -> list[str]:
    """What a reader has to know of log-probs sampled with options that reshape the distribution."""
    note = "the sampler's log-probs are those of the reshaped distribution, the trainer's are not"
    return [f"{', '.join(options)}: {note}"] if options else []


def request_seeds(session_seed: int, rollout: int, prompts: int, samples: int) -> np.ndarray:
    """Seeds of each sample (prompts, samples) int64, non-negative: SplitMix64 (Steele, Lea, Flood 2014).

    From session seed, rollout number, prompt and sample alone: a sample depends neither on how many others are drawn
    nor on the replica that draws it.
    """
    with np.errstate(over="ignore"):
        base = _mix(_mix(np.uint64(session_seed % 2**64)) ^ np.uint64(rollout))
        prompt = _mix(base ^ np.arange(prompts, dtype=np.uint64))[:, None]
        seeds = _mix(prompt ^ np.arange(samples, dtype=np.uint64)[None, :])
    return (seeds >> np.uint64(1)).astype(np.int64)


def turn_seed(seed: int, turn: int) -> int:
    """Seed of a sample's turn: its own for the first, so that one turn alone draws what a plain sample draws."""
    if turn == 0:
        return seed & 0x7FFF_FFFF_FFFF_FFFF
    mixed = np.random.SeedSequence([seed % 2**64, turn]).generate_state(1, np.uint64)[0]
    return int(mixed) & 0x7FFF_FFFF_FFFF_FFFF


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    z = np.asarray(x, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
