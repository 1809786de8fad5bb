"""Sampling options by vLLM's names: how people give them, their default length, and which reshape the distribution."""

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
}
"""Sampling options that reshape the distribution, with values that do not; a trainer knows the temperature alone."""
DERIVED = ("output_text_buffer_length",)
"""Fields that vLLM's SamplingParams sets itself."""


def sampling_options(given: Any) -> dict[str, Any]:
    """Return sampling options as a dict of one's own, from None, a mapping, or an object with them as attributes.

    Of vLLM's `SamplingParams`, whose fields all have defaults, those that differ from them count, and `max_tokens`
    always.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        options = dict(given)
    elif hasattr(given, "__struct_fields__"):
        options = _differing(given)
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


def reshaped_by(sampling: Mapping[str, Any]) -> tuple[str, ...]:
    """The options that make the sampler draw from another distribution than the trainer's, as they are typed."""
    return tuple(f"{name}={sampling[name]!r}" for name in reshaping(sampling))


def reshaping(sampling: Mapping[str, Any]) -> list[str]:
    """Names of the options that reshape the distribution, and are set so that they do."""
    return [name for name, harmless in NEUTRAL.items() if name in sampling and sampling[name] not in harmless]


def notes_of(sampling: Mapping[str, Any], truncated: Sequence[int] | np.ndarray, samples: int) -> tuple[str, ...]:
    """Return what a reader of `samples` completions has to know of how they were drawn; `truncated`: lengths of those
    cut short.
    """
    notes = []
    cut = int((np.asarray(truncated) >= DEFAULT_MAX_TOKENS).sum())
    if "max_tokens" not in sampling and cut:
        notes.append(
            f"{cut} of {samples} completions end at max_tokens={DEFAULT_MAX_TOKENS}, the default: pass max_tokens=…"
        )
    return (*notes, *([] if sampling.get("temperature") == 0 else reshaped_notes(reshaped_by(sampling))))


def reshaped_notes(options: tuple[str, ...]) -> list[str]:
    """What a reader has to know of log-probs sampled with options that reshape the distribution."""
    if not options:
        return []
    return [
        f"{', '.join(options)}: the sampler's log-probs are those of the reshaped distribution, the trainer's are not"
    ]


def _differing(given: Any) -> dict[str, Any]:
    plain = type(given)()
    names = [name for name in given.__struct_fields__ if name[0] != "_" and name not in DERIVED]
    found = {name: getattr(given, name) for name in names}
    return {
        name: value
        for name, value in found.items()
        if name == "max_tokens" or (value is not None and value != getattr(plain, name))
    }
