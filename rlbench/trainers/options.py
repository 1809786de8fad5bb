"""Options of a policy pass: one dataclass, checked by name, so that no option is without effect."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from rlbench.errors import DataError, nearest

LOGITS_BYTES = 2 << 30
LEAST_BUDGET, MOST_BUDGET = 1024, 16384


@dataclass(frozen=True)
class PolicyOptions:
    """How `policy_forward` and `policy_forward_backward` run.

    Attributes:
        token_budget: tokens of one micro-batch on one rank; None: what keeps its logits near 2 GiB.
        packing: without padding (transformers' causal attention models), or padded rows (any causal model).
        aggregation: how per-token losses become one, see `rlbench.rl.Aggregation`.
        temperature: divides the logits; None: the batch's own, the sampler's.
        old_logprobs: what stands in where the batch has none: "current" (this pass's own, without gradient:
            ratio 1) or "sampler".
        keep_tokens: return each row's log-probs and entropy as well as the metrics.
    """

    token_budget: int | None = None
    packing: bool = True
    aggregation: str = "token-mean"
    temperature: float | None = None
    old_logprobs: str = "current"
    keep_tokens: bool = True

    def __post_init__(self) -> None:
        if self.old_logprobs not in ("current", "sampler"):
            raise DataError(f"old_logprobs={self.old_logprobs!r}: it is 'current' or 'sampler'.")
        if self.temperature is not None and self.temperature <= 0:
            raise DataError(f"temperature={self.temperature}: log-probs need a temperature above 0.")

    @classmethod
    def of(cls, given: dict[str, Any]) -> PolicyOptions:
        """From a dict, refusing names that mean nothing."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise DataError(
                    f"unknown option {name!r}{nearest(name, known)}; options: {', '.join(known)}."
                )
        return cls(**given)

    def budget(self, vocab_size: int) -> int:
        """The token budget, chosen by the size of float32 logits (three such matrices live at once) where
        not given."""
        if self.token_budget is not None:
            return self.token_budget
        return max(LEAST_BUDGET, min(MOST_BUDGET, LOGITS_BYTES // (12 * max(1, vocab_size))))
