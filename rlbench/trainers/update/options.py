"""Options of a policy pass, for a session's verbs and for trainers; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rlbench.errors import DataError, nearest

if TYPE_CHECKING:
    from rlbench.rl import Aggregation

HEADS = ("auto", "chunked", "plain")
LOGITS_BYTES = 2 << 30
ACTIVATION_BYTES = 4 << 30
LEAST_BUDGET, MOST_BUDGET = 1024, 16384


@dataclass(frozen=True)
class PolicyOptions:
    """How `policy_forward` and `policy_forward_backward` run.

    Attributes:
        token_budget: tokens of one micro-batch on one rank; None: what keeps its logits near 2 GiB or, where
            there are none (`head`), its activations near 4 GiB, between 1024 and 16384.
        packing: without padding (transformers' causal attention models), or padded rows (any causal model).
        aggregation: how per-token losses become one, see `rlbench.rl.Aggregation`, by name or as a value; None:
            the one the loss is meant for.
        temperature: divides the logits; None: the batch's own, the sampler's.
        old_logprobs: what stands in where the batch has none: "current" (this pass's own, without gradient:
            ratio 1) or "sampler".
        keep_tokens: return each row's log-probs and entropy as well as the metrics.
        head: "chunked": log-probs and entropies straight from the output layer, never holding the logits;
            "plain": from the logits; "auto": chunked where the model allows it (it has one nn.Linear as its
            output layer and does nothing to the logits), else plain.
        tile: rows of the output layer that are computed at once, where it is chunked; None: what suits the device.
        whole_step: the optimizer's step follows at once. Where it does not, because the driver went away in between,
            the next pass drops these gradients instead of adding to them.
    """

    token_budget: int | None = None
    packing: bool = True
    aggregation: str | Aggregation | None = None
    temperature: float | None = None
    old_logprobs: str = "current"
    keep_tokens: bool = True
    head: str = "auto"
    tile: int | None = None
    whole_step: bool = False

    def __post_init__(self) -> None:
        if self.old_logprobs not in ("current", "sampler"):
            raise DataError(f"old_logprobs={self.old_logprobs!r}: it is 'current' or 'sampler'.")
        if self.head not in HEADS:
            raise DataError(f"head={self.head!r}{nearest(self.head, HEADS)}: it is 'auto', 'chunked' or 'plain'.")
        if self.temperature is not None and self.temperature <= 0:
            raise DataError(f"temperature={self.temperature}: log-probs need a temperature above 0.")
        if self.aggregation is not None:
            from rlbench.rl import Aggregation

            Aggregation.of(self.aggregation)

    @classmethod
    def of(cls, given: PolicyOptions | Mapping[str, Any]) -> PolicyOptions:
        """A value as it is; or from a dict, refusing names that mean nothing."""
        if isinstance(given, PolicyOptions):
            return given
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise DataError(f"unknown option {name!r}{nearest(name, known)}; options: {', '.join(known)}.")
        return cls(**given)

    @property
    def of_verbs(self) -> dict[str, Any]:
        """Those that are arguments of `session.train_step`, by name."""
        return {name: getattr(self, name) for name in ("aggregation", "token_budget", "packing", "head")}

    def budget(self, vocab_size: int, token_bytes: int | None = None) -> int:
        """The token budget; where not given, chosen by what the pass holds.

        Args:
            vocab_size: width of the logits (float32; three such matrices live at once).
            token_bytes: what a token holds where there are no logits (`PolicyModel.token_bytes`); None: there
                are.
        """
        if self.token_budget is not None:
            return self.token_budget
        held = LOGITS_BYTES // (12 * max(1, vocab_size))
        if token_bytes is not None:
            held = ACTIVATION_BYTES // max(1, token_bytes)
        return max(LEAST_BUDGET, min(MOST_BUDGET, held))
