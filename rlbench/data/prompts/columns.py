"""What functions written for other systems are called with: the columns of prompts' rows that they name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from typing import Any

from rlbench.data.prompts.prompt import Prompt
from rlbench.errors import DataError, some

IMAGES = frozenset({"images", "image"})
"""Parameters of TRL's that get a prompt's images, decoded by Pillow."""
SOUNDS = frozenset({"audios", "audio"})
"""Parameters that get a prompt's sounds, decoded: `{"array": …, "sampling_rate": …}`."""
LABELS = ("label", "labels", "answer", "solution", "ground_truth", "target")
"""Parameters that stand for the prompt's label, where its row kept no column of that name."""


def parameters_of(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name; none of one that does not say."""
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt's row by columns: its meta, the prompt itself, and its label by each name one may have."""
    labels = {} if prompt.label is None else dict.fromkeys(LABELS, prompt.label)
    return {**labels, **prompt.meta, "prompt": prompt.content}


def pictures_of(prompt: Prompt, fn: Callable[..., Any]) -> dict[str, Any]:
    """Return a prompt's images by the names of `IMAGES`, its sounds by those of `SOUNDS`, where a function names one of
    them: decoding takes time."""
    named = parameters_of(fn).keys()
    found: dict[str, Any] = {}
    if IMAGES & named:
        images = [image.pil() for image in prompt.images]
        found = {"images": images, "image": images[0] if images else None}
    if SOUNDS & named:
        sounds = [sound.decoded() for sound in prompt.sounds]
        found |= {"audios": sounds, "audio": sounds[0] if sounds else None}
    return found


def lacking(fn: Callable[..., Any], known: Set[str]) -> list[str]:
    """Return the parameters that a function needs and that are none of the known names."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return sorted(
        name
        for name, parameter in parameters_of(fn).items()
        if parameter.default is parameter.empty and parameter.kind not in kinds and name not in known
    )


def taken(fn: Callable[..., Any], name: str, known: Mapping[str, Any], others: Set[str]) -> dict[str, Any]:
    """Choose by a function's own parameters; `name`: what messages call it; `others`: what it also gets by **kwargs.
    DataError where a column that it needs lacks."""
    check_columns(name, lacking(fn, known.keys()), known)
    own = parameters_of(fn)
    chosen = {parameter: known[parameter] for parameter in own if parameter in known}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
        chosen |= {column: known[column] for column in sorted(others) if column in known}
    return chosen


def check_columns(name: str, absent: list[str], known: Mapping[str, Any]) -> None:
    """Refuse what takes columns that the prompts' rows do not have."""
    if absent:
        raise DataError(
            f"{name} takes {some(absent)}, and the prompts' rows have no such column; they have "
            f"{some(sorted(known), 12) or 'none'}: rb.data.load(…, meta=[…]) keeps more, or give it a default"
        )
