"""How completions that were forked from others (`Rollouts.fork`) stand beside them: a tree.

What a fork brought are ordinary completions, whose `mask` is False on what they did not sample themselves, and whose
info has `{"fork": {"at": 17, "of": 3, "text": "…", "under": "…"}}`: the tokens that stand before their own, of which
completion they were (its number after the last fork), what was written in between and which adapter sampled them, if
any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlbench.errors import DataError
from rlbench.units import format_number

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts


@dataclass(frozen=True)
class Branch:
    """What came of a fork: `value` is the mean reward of the completions `samples` that continue at response token `at`
    of the prompt `group`, `error` its standard error; NaN without rewards. `text`: what was written there; `under`: the
    adapter that continued, "" for the policy."""

    group: int
    at: int
    text: str
    samples: tuple[int, ...]
    value: float
    error: float
    under: str = ""

    def __repr__(self) -> str:
        written = f" behind {self.text[:30]!r}" if self.text else ""
        value = f"{format_number(self.value)} ± {format_number(self.error)}"
        written += f" under {self.under}" if self.under else ""
        return f"Branch(prompt {self.group} at {self.at}{written}: {len(self.samples)} continuations, value {value})"


def births(rollouts: Rollouts) -> list[int]:
    """Return how many response tokens stand before those that each completion sampled itself."""
    return [int(info.get("fork", {}).get("at", 0)) for info in rollouts.infos] or [0] * rollouts.samples


def branches(rollouts: Rollouts) -> tuple[Branch, ...]:
    """See `Rollouts.branches`."""
    rows: dict[tuple[int, bytes, str], list[int]] = {}
    for i, info in enumerate(rollouts.infos):
        if "fork" in info:
            begin = rollouts.responses[i][: info["fork"]["at"]].tobytes()
            rows.setdefault((int(rollouts.group[i]), begin, info["fork"].get("under", "")), []).append(i)
    rewards = np.full(rollouts.samples, np.nan) if rollouts.rewards is None else np.asarray(rollouts.rewards)
    found = []
    for (group, _, under), own in rows.items():
        fork = rollouts.infos[own[0]]["fork"]
        error = rewards[own].std(ddof=1) / len(own) ** 0.5 if len(own) > 1 else float("nan")
        value = float(rewards[own].mean())
        found.append(Branch(group, fork["at"], fork.get("text", ""), tuple(own), value, float(error), under))
    return tuple(found)


def origin(rollouts: Rollouts, branch: Branch) -> tuple[int, int]:
    """Return the completion that a branch continues, and how many of its tokens that keeps; −1 where it is not among
    them any more: its number may be another since some were taken out, so its tokens are compared."""
    first, *_ = branch.samples
    ids, rows = rollouts.responses[first], np.flatnonzero(rollouts.group == branch.group).tolist()
    born, noted = births(rollouts), int(rollouts.infos[first]["fork"]["of"])
    older = {i for i in rows if born[i] < branch.at or "fork" not in rollouts.infos[i]}
    for i in sorted(({noted} | older) & set(rows) - set(branch.samples), key=lambda i: (i != noted, i)):
        kept = _shared(rollouts.responses[i][: branch.at], ids[: branch.at])
        if kept == branch.at or (branch.text and i == noted):
            return i, kept
    return -1, branch.at


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many tokens two sequences begin with in common."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def nodes(rollouts: Rollouts) -> np.ndarray:
    """Number the places where completions of a prompt part, deeper ones higher, and tell of each response token behind
    which of them it stands: flat int64 from 1, 0 for tokens that a completion has from the one it was forked from."""
    for i, info in enumerate(rollouts.infos):
        if under := info.get("fork", {}).get("under"):
            raise DataError(
                f"completion {i} was continued under {under!r}: its reward is no value of the policy. Take "
                "branch values of a tree without it: rollouts.select(lambda r: 'under' not in r.info.get('fork', {}))"
            )
    born = births(rollouts)
    numbers = np.zeros(len(rollouts.logprobs), np.int64)
    count = 0
    for group in np.unique(rollouts.group):
        rows = np.flatnonzero(rollouts.group == group).tolist()
        begins = {rollouts.responses[i][: born[i]].tobytes(): born[i] for i in rows} | {b"": 0}
        known = sorted(begins, key=begins.__getitem__)
        for i in rows:
            own, start = rollouts.responses[i], int(rollouts.responses.offsets[i])
            for number, begin in enumerate(known, count + 1):
                place = begins[begin]
                if born[i] <= place < len(own) and own[:place].tobytes() == begin:
                    numbers[start + place : start + len(own)] = number
        count += len(known)
    return numbers
