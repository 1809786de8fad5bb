"""What a session's own policy is made from; a plain value, importable without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlbench.errors import BuildError
from rlbench.options import Options, section

TASK = re.compile(r"For[A-Z]\w*$")
"""What transformers' classes say they are for; a class of the user's own need not."""


policy = section("Policy")


class OptimizerOptions(Options):
    """The optimizer of a policy, and how its module is held; what `rb.Train` takes as well."""

    lr: float = policy(1e-6, "learning rate of AdamW")
    betas: tuple[float, float] = policy((0.9, 0.999), "of AdamW")
    eps: float = policy(1e-8, "of AdamW")
    weight_decay: float = policy(0.0, "of AdamW")
    max_norm: float = policy(1.0, "global gradient norm to clip to; 0: no clipping")
    dtype: str | None = policy(
        None,
        "of the parameters, as torch names it (float32); None: the checkpoint's. What trains in half precision is held "
        "in float32 all the same",
    )
    gradient_checkpointing: bool = policy(False, "recompute activations in the backward")


class PolicySpec(OptimizerOptions, kw_only=False):
    """A causal language model from a folder or hub id; shipped to the ranks, where calling it makes the module.

    Args:
        path: folder or hub id.
        trainable: with an optimizer; False gives a frozen model (a reference) without one.
        revision: of a hub id.
    """

    path: str
    trainable: bool = True
    revision: str | None = None

    def __call__(self) -> Any:
        """Make the module, on meta."""
        from rlbench.trainers.models.policy_module import make_policy

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
