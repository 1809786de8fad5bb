"""Which few of many samples tell a reader most, and what one looks for in a text first: repetition, second thoughts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

import numpy as np

Traits = Mapping[str, np.ndarray]
"""What the choice is made by, one entry per sample, NaN where not known: `group` (of which prompt; int64), `reward`
(before shaping), `advantage` and `entropy` (means over trained tokens), `length`, `truncated`."""
REFLECTIONS = ("wait", "recheck", "double-check", "retry", "alternatively", "however", "let me check", "let me verify")
_PATTERNS = {words: re.compile(rf"(?<!\w){re.escape(words)}(?!\w)", re.IGNORECASE) for words in REFLECTIONS}


def most_telling(traits: Traits, count: int) -> list[tuple[int, str]]:
    """At most `count` samples, the most telling first, each with what it was chosen for.

    In turn the highest and the lowest reward, the highest and the lowest advantage, the longest, a truncated one (the
    longest first) and the one of the highest entropy; then the next of each. While there are prompts nothing was chosen
    of, only their samples are; afterwards any. Among equals the sample of the lower group comes first.
    """
    group, length = traits["group"], traits["length"].astype(float)
    criteria = {
        "highest reward": -traits["reward"],
        "lowest reward": traits["reward"],
        "highest advantage": -traits["advantage"],
        "lowest advantage": traits["advantage"],
        "longest": -length,
        "truncated": np.where(traits["truncated"], -length, np.nan),
        "highest entropy": -traits["entropy"],
    }
    queues = {  # lexsort is stable: samples of one group stay in their order
        reason: [int(i) for i in np.lexsort((group, key)) if not np.isnan(key[i])] for reason, key in criteria.items()
    }
    turns = itertools.cycle(queues.items())
    chosen: dict[int, str] = {}
    seen: set[int] = set()
    for new_groups_only in (True, False):
        in_vain = 0  # criteria in a row that had nothing to offer
        while len(chosen) < min(count, len(group)) and in_vain < len(queues):
            reason, queue = next(turns)
            fitting = (i for i in queue if i not in chosen and not (new_groups_only and int(group[i]) in seen))
            if (found := next(fitting, None)) is None:
                in_vain += 1
                continue
            chosen[found], in_vain = reason, 0
            seen.add(int(group[found]))
    return list(chosen.items())


def repeat_score(text: str) -> float:
    """How much of a text was there before, from 0 up to below 1; above some 0.2 a response goes round in circles.

    Twice the sum of the longest common prefixes of neighbours in the suffix array, divided by n (n + 1); O(n log² n).
    """
    n, total, common = len(text), 0, 0
    if n < 2:
        return 0.0
    order, places = _suffix_array(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32))
    for start in range(n):  # from one suffix to the next a common prefix shrinks by at most one (Kasai et al. 2001)
        if places[start] == 0:
            common = 0
            continue
        other = order[places[start] - 1]
        while max(start, other) + common < n and text[start + common] == text[other + common]:
            common += 1
        total += common
        common = max(0, common - 1)
    return 2.0 * total / (n * (n + 1))


def _suffix_array(codes: np.ndarray) -> tuple[list[int], list[int]]:
    """The starts of the suffixes in their order, and each suffix's place in it; prefixes double in every round."""
    n, width = len(codes), 1
    ranks = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    while True:
        behind = np.concatenate([ranks[width:] + 1, np.zeros(min(width, n), np.int64)])
        order = np.lexsort((behind, ranks))
        changed = (np.diff(ranks[order]) != 0) | (np.diff(behind[order]) != 0)
        ranks = np.empty(n, np.int64)
        ranks[order] = np.concatenate([np.zeros(1, np.int64), np.cumsum(changed)])
        if ranks[order[-1]] == n - 1:
            return order.tolist(), ranks.tolist()
        width *= 2


def reflection_counts(text: str) -> dict[str, int]:
    """How often each of `REFLECTIONS` stands in a text, whole and in any case; those that do not are left out."""
    counts = {words: len(pattern.findall(text)) for words, pattern in _PATTERNS.items()}
    return {words: count for words, count in counts.items() if count}
