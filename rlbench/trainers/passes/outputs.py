"""What a pass gives of each response token: its log-prob and entropy, and what a loss or a caller asks for beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbench.data.batches.batch import TrainBatch
from rlbench.data.batches.columns import TEACHER_IDS
from rlbench.trainers.passes.token_stats import token_stats


@dataclass(frozen=True)
class Request:
    """What a pass is to give beside log-probs and entropies of its R tokens.

    `candidates`: (R, K) int64, more tokens at each place whose log-probs are wanted; `top_k`: as many of the likeliest,
    in their place (without gradient, as which they are has none).
    """

    hidden_states: bool = False
    logits: bool = False
    candidates: Tensor | None = None
    top_k: int = 0

    @classmethod
    def of(cls, needs: Sequence[str], batch: TrainBatch, device: torch.device, top_k: int = 0) -> Request:
        """What a loss with these `needs` asks of a micro-batch."""
        ids = batch.columns.get(TEACHER_IDS) if "teacher" in needs else None
        candidates = None if ids is None else torch.from_numpy(ids).to(device, torch.int64)
        return cls("hidden_states" in needs, "logits" in needs, candidates, top_k)


NO_MORE = Request()


@dataclass(frozen=True)
class TokenOutputs:
    """Of R response tokens: log-probs and entropies (R,); where asked for, tokens `candidates` (R, K) and their
    log-probs, the `hidden_states` (R, H) that predict them, and the `logits` (R, V) over the temperature, float32. Of a
    reward model the `scores` (R,) after them, of several heads also theirs, `head_scores` (R, heads); its log-probs and
    entropies are NaN."""

    logprobs: Tensor
    entropy: Tensor
    candidates: Tensor | None = None
    candidate_logprobs: Tensor | None = None
    hidden_states: Tensor | None = None
    logits: Tensor | None = None
    scores: Tensor | None = None
    head_scores: Tensor | None = None

    @property
    def trained(self) -> Tensor:
        """Return what depends on every parameter that a pass ran through, (R,)."""
        return self.logprobs if self.scores is None else self.scores

    def channels(self, names: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return what there is by name; `names`: those alone. A reward model has scores and nothing else."""
        found = {name: value for name, value in vars(self).items() if value is not None}
        chosen = names or tuple(found)
        if self.scores is not None:
            chosen = tuple(name for name in OF_SCORES if name in found)
        return {name: found[name] for name in chosen}


OF_SCORES = ("scores", "head_scores")
"""Those of `TokenOutputs` that a reward model has."""
ASKED_FOR = ("candidates", "candidate_logprobs", "hidden_states", "logits")
"""Those of `TokenOutputs` that are there on request."""


def of_logits(
    logits: Tensor, targets: Tensor, temperature: float, request: Request, hidden: Tensor | None = None
) -> TokenOutputs:
    """Take from the logits (R, V) what is asked for."""
    candidates = logits.detach().topk(request.top_k, dim=-1).indices if request.top_k else request.candidates
    logprobs, entropy = token_stats(logits, with_candidates(targets, candidates), temperature)
    return TokenOutputs(
        logprobs=logprobs[:, 0],
        entropy=entropy,
        candidates=candidates,
        candidate_logprobs=None if candidates is None else logprobs[:, 1:],
        hidden_states=hidden if request.hidden_states else None,
        logits=logits.float() / temperature if request.logits else None,
    )


def with_candidates(targets: Tensor, candidates: Tensor | None) -> Tensor:
    """The sampled token of each place (R,) and its candidates, (R, 1 + K)."""
    return targets[:, None] if candidates is None else torch.cat([targets[:, None], candidates], dim=1)
