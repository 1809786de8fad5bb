"""Names of a reward model's heads, and their weights in its score."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from rlbench.errors import BuildError

NAME = re.compile(r"[A-Za-z]\w*(-\w+)*")


def head_weights(given: Any) -> dict[str, float]:
    """Read heads: {"quality": 0.7, "style": 0.3}, names with weights; a list of names, each of an equal part of 1; or
    texts, "quality=0.7" each, as on a command line. Raises BuildError for what is none, two alike, or a sum of nothing.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else _listed(given)
    if not pairs:
        raise BuildError("heads: there are none; leave heads= out for one without a name")
    found: dict[str, float] = {}
    for name, weight in pairs:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise BuildError(f"heads: {name!r} is no name: letters, digits, _ and -, a letter first")
        if name in found:
            raise BuildError(f"heads: {name!r} is there twice")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise BuildError(f"heads: the weight of {name!r} is {weight!r}: wanted a finite number")
        found[name] = float(weight)
    if not any(found.values()):
        raise BuildError("heads: no weight is other than 0, so the score would always be 0")
    return found


def _listed(given: Any) -> list[tuple[Any, Any]]:
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        raise BuildError(f"heads={given!r}: wanted names, ['quality', 'style'], or {{'quality': 0.7, 'style': 0.3}}")
    names = list(given)
    weighed = [name for name in names if isinstance(name, str) and "=" in name]
    if not weighed:
        return [(name, 1.0 / len(names)) for name in names]
    if len(weighed) < len(names):
        raise BuildError(f"heads: only some of {', '.join(map(str, names))} have a weight: give all one, or none")
    return [_weighed(name) for name in names]


def _weighed(text: str) -> tuple[str, Any]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        return name, number
