"""Completions whose context was written anew: several sequences, each trained on behind what it was sampled behind.

With `thoughts="strip"` (`rlbench.envs.thoughts`) a turn may be sampled behind a conversation that no longer holds what
the policy thought before. A completion then has all tokens in the order they came: those of a first context behind its
prompt, then for each number in its info's `"contexts"` a whole conversation that begins at that response token, with
what was observed of it ahead. A reward, an advantage and the viewer see one completion; a batch has a sequence for each
context:

    prompt │ <think>…</think>3 │ user: 3? assistant: 3 user: wrong │ <think>…</think>4       contexts: [7]
    sequences:   prompt → <think>…</think>3      and      user: 3? assistant: 3 user: wrong → <think>…</think>4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.data.rollouts.turns import sampled_mask
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts


@dataclass(frozen=True, eq=False)
class Sequences:
    """What is trained on of rollouts, S sequences.

    `sample` (S,) int64: the completion of each; `tokens`: where among all response tokens those of `responses` stand,
    one after another within a sequence; `routing`: of each whole sequence, where experts are known.
    """

    sample: np.ndarray
    prompts: Ragged
    responses: Ragged
    tokens: np.ndarray | slice
    routing: Ragged | None

    @property
    def starts(self) -> np.ndarray:
        """(S,) int64: where among all response tokens the response of each begins."""
        begins = self.responses.offsets[:-1]
        return begins if isinstance(self.tokens, slice) else self.tokens[begins]


def contexts_of(rollouts: Rollouts, sample: int) -> list[int]:
    """Return the response tokens of a completion at which its context was written anew."""
    return [int(at) for at in rollouts.infos[sample].get("contexts", ())] if rollouts.infos else []


def context_before(rollouts: Rollouts, sample: int, at: int) -> int | None:
    """Return at which response token the context begins that the token `at` was sampled behind; None: the prompt."""
    return max((begin for begin in contexts_of(rollouts, sample) if begin < at), default=None)


def several(rollouts: Rollouts) -> bool:
    """Whether a completion has more than one context."""
    return any("contexts" in info for info in rollouts.infos)


def refuse_several(rollouts: Rollouts, what: str) -> None:
    """Refuse rollouts of which a completion is several sequences."""
    if several(rollouts):
        raise DataError(
            f"{what} takes a completion as one sequence, and thoughts='strip' made several of some: roll out with "
            "thoughts='keep'"
        )


def moved(info: Mapping[str, Any], by: int) -> dict[str, Any]:
    """Return an info whose completion has so many more tokens in front."""
    return {**info, "contexts": [at + by for at in info["contexts"]]} if "contexts" in info else dict(info)


def sequences(rollouts: Rollouts) -> Sequences:
    """Return the sequences of completions; those of contexts in which nothing was sampled are left out."""
    if not several(rollouts):
        prompts = rollouts.prompt_ids.take(rollouts.group)
        sample = np.arange(rollouts.samples)
        return Sequences(sample, prompts, rollouts.responses, slice(None), rollouts.routing)
    mask = sampled_mask(rollouts)
    spans = [span for i in range(rollouts.samples) for span in _spans(rollouts, mask, i)]
    rows = [np.arange(span.begin, span.end) for span in spans]
    return Sequences(
        sample=np.array([span.sample for span in spans], np.int64),
        prompts=Ragged.from_rows([span.prompt for span in spans], np.int32),
        responses=Ragged.from_rows([rollouts.responses.values[row] for row in rows], np.int32),
        tokens=np.concatenate(rows),
        routing=_routing(rollouts, spans),
    )


@dataclass(frozen=True, eq=False)
class _Span:
    """One sequence: its prompt, and the response tokens of all rollouts that it has behind that; `first`: where its
    prompt begins among these, None where it is the completion's own."""

    sample: int
    prompt: np.ndarray
    begin: int
    end: int
    first: int | None


def _spans(rollouts: Rollouts, mask: np.ndarray, sample: int) -> list[_Span]:
    start, stop = rollouts.responses.offsets[sample : sample + 2].tolist()
    bounds = [start, *(start + at for at in contexts_of(rollouts, sample)), stop]
    spans = [_Span(sample, rollouts.prompt_ids[rollouts.group[sample]], start, bounds[1], None)]
    for first, end in pairwise(bounds[1:]):
        begin = first + int(np.argmax(mask[first:end]))  # what was observed of it is its prompt
        spans.append(_Span(sample, rollouts.responses.values[first:begin], begin, end, first))
    sampled = [span for span in spans if mask[span.begin : span.end].any()]
    return sampled or spans[:1]


def _routing(rollouts: Rollouts, spans: Sequence[_Span]) -> Ragged | None:
    """Return the experts of sequences: a completion's own are of its prompt, then of its response."""
    if rollouts.routing is None:
        return None
    rows = []
    for span in spans:
        own, length = rollouts.routing[span.sample], len(rollouts.prompt_ids[rollouts.group[span.sample]])
        offset = length - int(rollouts.responses.offsets[span.sample])
        rows.append(own[(0 if span.first is None else span.first + offset) : span.end + offset])
    return Ragged(np.concatenate(rows), offsets_of([len(row) for row in rows]))
