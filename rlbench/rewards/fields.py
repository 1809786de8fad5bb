"""Where a rule finds what it compares: the reference answer, and the part of the completion that holds the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlbench.errors import DataError, nearest

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout

By = str | Callable[["Rollout"], Any] | None
"""None: the prompt's label. A text: that key of the prompt's `meta`. A function: what it returns of the rollout."""


def read(rollout: Rollout, by: By) -> Any:
    """What `by` says of a completion's prompt."""
    if callable(by):
        return by(rollout)
    if by is not None:
        meta = rollout.source.meta
        if by not in meta:
            known = ", ".join(map(str, meta)) or "no keys"
            raise DataError(f"the prompt's meta has no {by!r}{nearest(by, map(str, meta))}; there are {known}")
        return meta[by]
    if rollout.label is None:
        raise DataError("the prompt has no label to compare with: rb.Prompt(text, label=…), or label='a key of meta'")
    return rollout.label


def part(text: str, inside: str | None) -> str | None:
    """The text inside the last `<inside>…</inside>`; None where there is none. All of it where `inside` is None."""
    if inside is None:
        return text
    end = text.rfind(f"</{inside}>")
    start = text.rfind(f"<{inside}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(inside) + 2 : end]


def shown(name: str, *args: Any, **options: Any) -> str:
    """`name('a', group=1)`: how a reward was made; what is None or False is left out."""
    given = [f"{key}={value!r}" for key, value in options.items() if value is not None and value is not False]
    return f"{name}({', '.join([*map(repr, args), *given])})"
