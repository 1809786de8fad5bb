"""What a session's own policy is made from; a plain value, importable without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.errors import BuildError

TASK = re.compile(r"For[A-Z]\w*$")
"""What transformers' classes say they are for; a class of the user's own need not."""


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


def check_causal(path: str, architectures: Sequence[str], model_type: str) -> None:
    """Refuse a checkpoint of something else than a causal language model, by the names its config gives.

    Raises:
        BuildError: it is a vision-language model, a classifier, an encoder, …
    """
    tasks = [found[0] for name in architectures if (found := TASK.search(name))]
    if tasks and "ForCausalLM" not in tasks:
        raise BuildError(
            f"{path!r} is a {model_type!r} model ({', '.join(architectures)}), which is no causal language model: a "
            "session trains and samples those alone. A module of your own class trains on rb.TrainEngine; rewards and "
            "critics take classifiers (rb.rewards, make_critic)"
        )
