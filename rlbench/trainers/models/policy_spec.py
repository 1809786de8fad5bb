"""What a session's own policy is made from; a plain value, importable without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlbench.errors import BuildError, nearest
from rlbench.options import Options, section
from rlbench.trainers.models.lora import Lora

if TYPE_CHECKING:
    from rlbench.rewards.shaped_head import HeadShape

TASK = re.compile(r"For[A-Z]\w*$")
"""What transformers' classes say they are for; a class of the user's own need not."""
VISION_LANGUAGE = ("Qwen2VLForCond", "Qwen2_5_VLForCond", "Qwen3VLForCond")
"""How classes begin of vision-language models that train here: causal models that take images besides."""
AUDIO_LANGUAGE = ("Qwen2AudioForCond",)
"""Likewise of audio-language models, which take sounds."""
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
    lora: Lora | None = policy(None, "train adapters and freeze the weights: rb.Lora(rank=32); None: train all weights")
    gradient_checkpointing: bool = policy(False, "recompute activations in the backward")


class PolicySpec(OptimizerOptions, kw_only=False):
    """A causal language model from a folder or hub id; shipped to the ranks, where calling it makes the module.

    One that is not `trainable` is frozen (a reference), without an optimizer.
    """

    path: str
    trainable: bool = True
    revision: str | None = None

    def __call__(self) -> Any:
        """Make the module, on meta."""
        from rlbench.trainers.models.policy_module import make_policy

        return make_policy(self)


class RewardSpec(PolicySpec, kw_only=False):
    """A reward model from a causal language model, or from one with a scalar head.

    `head_seed` draws a head that the checkpoint lacks; `pooling` and `probing_layer` say what it reads (`HeadShape`),
    None: as the checkpoint's does, or the last token of the last layer. `heads`: several, as of `head_weights`; None:
    as the checkpoint has, or one.
    """

    head_seed: int = 0
    pooling: str | None = None
    probing_layer: int | None = None
    heads: Mapping[str, float] | Sequence[str] | None = None

    def __call__(self) -> Any:
        """Make the module, on meta."""
        from rlbench.trainers.models.reward_heads import make_trained_reward

        return make_trained_reward(self)

    def shape(self) -> HeadShape:
        """Return what the head reads, or heads. Raises BuildError where the checkpoint has a head that reads otherwise,
        or other heads; their weights in the score are those asked for."""
        from rlbench.rewards.head_names import head_weights
        from rlbench.rewards.shaped_head import HeadShape
        from rlbench.trainers.models.policy_module import config_of

        config = config_of(self.path, self.revision)
        there = HeadShape.of(config)
        heads = None if self.heads is None else head_weights(self.heads)
        asked: dict[str, Any] = {"pooling": self.pooling, "probing_layer": self.probing_layer, "heads": heads}
        given = {name: value for name, value in asked.items() if value is not None}
        wanted = replace(there, **given)
        wanted.check(config)
        trained = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
        if trained and wanted.heads.keys() != there.heads.keys():
            raise BuildError(self._other_heads(wanted.heads, there.heads))
        given.pop("heads", None)
        if trained and given and replace(wanted, heads=there.heads) != there:
            raise BuildError(
                f"{self.path!r} has a head already, with pooling={there.pooling!r} and probing_layer="
                f"{there.probing_layer}: leave {' and '.join(given)} out to go on from it, or begin from the language "
                "model"
            )
        return wanted

    def _other_heads(self, asked: Mapping[str, float], there: Mapping[str, float]) -> str:
        """Say that a reward model has other heads than those asked for."""
        if not there:
            said = f"{self.path!r} has one head without a name"
            return f"{said}: leave heads= out to go on from it, or begin from the language model"
        wrong = [name for name in asked if name not in there] or [name for name in there if name not in asked]
        said = f"no head {wrong[0]!r}{nearest(wrong[0], there)}" if wrong[0] in asked else f"a head {wrong[0]!r} too"
        return f"{self.path!r} has {said}; its heads are {', '.join(there)}, and heads= weighs each of them"


def check_unquantised(path: str, quantization: Any) -> None:
    """Refuse a checkpoint whose weights are quantised: there are no weights in it that could be trained, or sent."""
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise BuildError(
            f"{path!r} holds quantised weights ({method or 'quantization_config'}), which cannot be trained: give the "
            "checkpoint it was made of, with rb.Train(lora=rb.Lora(base='nf4')) to hold it in 4 bits"
        )


def check_causal(path: str, architectures: Sequence[str], model_type: str, classifiers: bool = False) -> None:
    """Refuse a checkpoint of something else than a causal language model (or where `classifiers`, one with a scalar
    head), by the names its config gives."""
    tasks = [found[0] for name in architectures if (found := TASK.search(name))]
    if any(name.startswith((*VISION_LANGUAGE, *AUDIO_LANGUAGE)) for name in architectures):
        return
    known = {"ForCausalLM", *(["ForSequenceClassification"] if classifiers else [])}
    if tasks and not known.intersection(tasks):
        if classifiers:
            raise BuildError(
                f"{path!r} is a {model_type!r} model ({', '.join(architectures)}): a reward model is made of a causal "
                "language model, or of one with a scalar head (…ForSequenceClassification)"
            )
        raise BuildError(
            f"{path!r} is a {model_type!r} model ({', '.join(architectures)}), no causal language model: a session "
            "trains and samples those alone. rb.TrainEngine trains a module of your own; rewards and critics take "
            "classifiers (rb.rewards, make_critic)"
        )
