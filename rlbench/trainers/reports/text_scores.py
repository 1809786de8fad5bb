"""What a reader looks for in a response first: text that repeats itself, and second thoughts."""

from __future__ import annotations

import re

import numpy as np

REFLECTIONS = ("wait", "recheck", "double-check", "retry", "alternatively", "however", "let me check", "let me verify")
_PATTERNS = {words: re.compile(rf"(?<!\w){re.escape(words)}(?!\w)", re.IGNORECASE) for words in REFLECTIONS}


def repeat_score(text: str) -> float:
    """How much of a text was there before, from 0 up to below 1.

    Twice the sum of the longest common prefixes of neighbours in the suffix array, divided by n (n + 1), over the n
    characters: 0 where no character comes twice, (n - 1) / (n + 1) for one character n times. Above some 0.2 a response
    goes round in circles. Takes O(n log² n).
    """
    n = len(text)
    if n < 2:
        return 0.0
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    order, ranks = _suffix_array(codes)
    return 2.0 * _common_prefixes(codes, order, ranks) / (n * (n + 1))


def _suffix_array(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The starts of the suffixes in their order, and each suffix's place in it; prefixes double in every round."""
    n = len(codes)
    ranks = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    width = 1
    while True:
        behind = np.concatenate([ranks[width:] + 1, np.zeros(min(width, n), np.int64)])
        order = np.lexsort((behind, ranks))
        changed = (np.diff(ranks[order]) != 0) | (np.diff(behind[order]) != 0)
        ranks = np.empty(n, np.int64)
        ranks[order] = np.concatenate([np.zeros(1, np.int64), np.cumsum(changed)])
        if ranks[order[-1]] == n - 1:
            return order, ranks
        width *= 2


def _common_prefixes(codes: np.ndarray, order: np.ndarray, ranks: np.ndarray) -> int:
    """The sum of the common prefixes of neighbouring suffixes; from one suffix to the next by position a common prefix
    shrinks by at most one (Kasai et al. 2001)."""
    text, places, starts = codes.tolist(), ranks.tolist(), order.tolist()
    n, total, common = len(text), 0, 0
    for start in range(n):
        if places[start] == 0:
            common = 0
            continue
        other = starts[places[start] - 1]
        while max(start, other) + common < n and text[start + common] == text[other + common]:
            common += 1
        total += common
        common = max(0, common - 1)
    return total


def reflection_counts(text: str) -> dict[str, int]:
    """How often each of `REFLECTIONS` stands in a text, whole and in any case; those that do not are left out."""
    counts = {words: len(pattern.findall(text)) for words, pattern in _PATTERNS.items()}
    return {words: count for words, count in counts.items() if count}
