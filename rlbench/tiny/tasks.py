"""A task that can be generated and verified: put the digits of a number in ascending order.

Prompts are chat messages, `[{"role": "user", "content": "sort 52143"}]`; the one right answer is `12345`.
Numbers are split once and for all into train and eval by a checksum of their digits: no seed can mix the two.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlbench.errors import DataError

Messages = list[dict[str, str]]
SPLITS = ("train", "eval")
DIGITS = (4, 8)
"""Fewest and most digits of a number."""
EVAL_SHARE = 5
"""One number in so many belongs to the eval split."""
PATTERN = re.compile(r"\s*sort ([0-9]+)\s*")


def prompts(count: int, split: str = "train", seed: int = 0) -> list[Messages]:
    """Return `count` prompts of one split, "train" or "eval", without repeats; the same seed gives the same prompts."""
    if count < 1:
        raise DataError(f"prompts: count={count} asks for nothing; give at least 1.")
    numbers = stream(split, seed)
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen.setdefault(next(numbers))
    return [message(digits) for digits in chosen]


def stream(split: str, seed: int) -> Iterator[str]:
    """Yield random numbers of one split for ever, as strings of digits; repeats happen."""
    if split not in SPLITS:
        raise DataError(f"unknown split {split!r}; use one of: {', '.join(SPLITS)}.")
    source = random.Random(f"sort/{split}/{seed}")
    while True:
        digits = "".join(source.choices("0123456789", k=source.randint(*DIGITS)))
        if split_of(digits) == split:
            yield digits


def split_of(digits: str) -> str:
    """Return the split a number belongs to."""
    return "eval" if zlib.crc32(digits.encode()) % EVAL_SHARE == 0 else "train"


def message(digits: str) -> Messages:
    """Return the prompt for a number."""
    return [{"role": "user", "content": f"sort {digits}"}]


def answer(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the right answer to a prompt of this task, given as messages or as the last message's text."""
    last = prompt[-1] if prompt and not isinstance(prompt, str) else {"content": prompt}
    content = last.get("content") if isinstance(last, Mapping) else last
    question = PATTERN.fullmatch(str(content))
    if question is None:
        raise DataError(f"not a prompt of the sorting task: {content!r:.80}; it reads like 'sort 52143'.")
    return "".join(sorted(question[1]))


def reward(rollout: Any) -> float:
    """Return 1.0 if the whole `.text` is the right answer to the rollout's `.prompt`, else 0.0."""
    prompt = getattr(rollout.prompt, "content", rollout.prompt)
    return float(rollout.text == answer(prompt))
