"""Numbers that a user gives for things in a row: a list of them, or a mapping by their places."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from rlbench.errors import DataError


def in_order(given: Any, count: int, what: str) -> list[Any]:
    """Return the `count` values of an iterable, or of a mapping {0: …, 1: …} by their places.

    Raises DataError for a set, which has no order, for other keys, and for what holds no values or another number.
    """
    wanted = f"wanted a list of {count} numbers, in their order"
    if isinstance(given, Mapping):
        if set(given) != set(range(count)):
            keys = ", ".join(repr(key) for key in list(given)[:6])
            raise DataError(f"{what} a mapping with the keys {keys or 'none'}; {wanted}, or the keys 0 to {count - 1}")
        return [given[place] for place in range(count)]
    if isinstance(given, Set | str | bytes):
        kind = f"a {type(given).__name__}, which has no order" if isinstance(given, Set) else f"the text {given[:40]!r}"
        raise DataError(f"{what} {kind}; {wanted}")
    try:
        values = list(given)
    except TypeError:
        raise DataError(f"{what} {type(given).__name__} {str(given)[:40]!r}; {wanted}") from None
    if len(values) != count:
        raise DataError(f"{what} {len(values)} values for {count} completions; {wanted}")
    return values
