"""Options of a policy pass, for a session's verbs and for trainers; importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rlbench.errors import DataError, nearest
from rlbench.options import refuse

if TYPE_CHECKING:
    from rlbench.rl import Aggregation

OF_VERBS = ("aggregation", "token_budget", "packing", "share_prompts", "head")
HEADS = ("auto", "chunked", "plain")
LEAST_MEMORY = 32 << 30
"""A device's memory, in bytes, up to which micro-batches are as large as on a host."""
LOGITS_SHARE, ACTIVATION_SHARE = 16, 8
"""One part of so many of a device's memory is for a micro-batch's logits, or activations."""
LEAST_BUDGET, MOST_BUDGET = 1024, 16384


@dataclass(frozen=True)
class PolicyOptions:
    """How `policy_forward` and `policy_forward_backward` run."""

    token_budget: int | None = None
    """Tokens of one micro-batch on one rank; None: what keeps activations near 4 GiB, or an eighth of a larger GPU."""
    packing: bool | None = None
    """Without padding (transformers' causal attention models), or padded rows (any causal model); None: without where
    the model computes the same so."""
    aggregation: str | Aggregation | None = None
    """How per-token losses become one; None: as the loss is meant."""
    temperature: float | None = None
    """Divides the logits; None: the batch's own, the sampler's."""
    old_logprobs: str = "recompute"
    """What stands in where the batch has none: this pass's own, without gradient (ratio 1), or "sampler"."""
    keep_tokens: bool = True
    """Return each row's log-probs and entropy as well as the metrics."""
    head: str = "auto"
    """Log-probs "chunked", straight from the output layer, "plain", from the logits, or as the model allows."""
    tile: int | None = None
    """Rows of the output layer that are computed at once, where it is chunked; None: what suits the device."""
    adapters: bool = True
    """Compute with the adapters on; off, in a forward alone, gives the base's log-probs: the reference of LoRA."""
    top_k: int = 0
    """A forward also gives so many of the likeliest tokens at each place, with their log-probs: a teacher's."""
    needs: tuple[str, ...] = ()
    """A forward also gives what a loss with these `needs` sees."""
    whole_step: bool = False
    """The optimizer's step follows at once; where its driver went away instead, the next pass drops the gradients."""
    threads: int | None = None
    """Of a host, that compute a forward of little work, as others compute meanwhile; one of more takes half of the
    rank's. None: all of them."""
    share_prompts: bool = False
    """A prompt that several rows of a micro-batch begin with is computed once; its rows go together."""
    aux_loss_coef: float = 0.0
    """Weight, in a loss, of how unevenly the routers of a mixture of experts spread each sequence's tokens."""

    def __post_init__(self) -> None:
        if self.old_logprobs not in ("recompute", "sampler"):
            raise DataError(f"old_logprobs={self.old_logprobs!r}: it is 'recompute' or 'sampler'.")
        not_both = "cannot be honoured together"
        refuse(
            (
                self.share_prompts and self.packing is False,
                f"share_prompts=True and packing=False {not_both}: a padded row has a prompt of its own",
            ),
            (
                self.share_prompts and self.aux_loss_coef,
                f"share_prompts=True and aux_loss_coef={self.aux_loss_coef:g} {not_both}: a sequence is balanced whole",
            ),
        )
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
    def packed(self) -> bool:
        """Whether rows are packed: `packing`, where it is open as before it was found that the model cannot."""
        return self.packing is not False

    @property
    def of_verbs(self) -> dict[str, Any]:
        """Those that are arguments of `session.train_step`, by name."""
        return {name: getattr(self, name) for name in OF_VERBS}

    def budget(self, vocab_size: int, token_bytes: int | None = None, memory: int = 0) -> int:
        """The token budget; where not given, by what the pass holds in a part of a GPU's `memory` (bytes; 0: a host's):
        logits (three float32 matrices of that width live at once), or `token_bytes` of a token where there are none."""
        if self.token_budget is not None:
            return self.token_budget
        memory = max(LEAST_MEMORY, memory)
        held = memory // LOGITS_SHARE // (12 * max(1, vocab_size))
        if token_bytes is not None:
            held = memory // ACTIVATION_SHARE // max(1, token_bytes)
        return max(LEAST_BUDGET, min(MOST_BUDGET, held))
