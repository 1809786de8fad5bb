"""What a session's own policy is made from; a plain value, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PolicySpec:
    """A causal language model from a folder or hub id. Shipped to the ranks, where calling it makes the
    module.

    Attributes:
        path: folder or hub id.
        trainable: with an optimizer; False gives a frozen model (a reference) without one.
        lr, betas, eps, weight_decay: AdamW's.
        max_norm: global gradient norm to clip to; 0: no clipping.
        dtype: of the parameters, as torch names it ("float32"); None: the checkpoint's. A trainable model
            in half precision is held in float32 all the same.
        gradient_checkpointing: recompute activations in the backward.
        revision: of a hub id.
    """

    path: str
    trainable: bool = True
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    dtype: str | None = None
    gradient_checkpointing: bool = False
    revision: str | None = None

    def __call__(self) -> Any:
        """Make the module, on meta."""
        from rlbench.trainers.policy_module import make_policy

        return make_policy(self)
