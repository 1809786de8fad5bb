"""Descriptions of trainers that are to be built on the ranks of a session: what `session.trainer` and the command line
make and send, without importing what builds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlbench.data import TextStream, TrainBatch
from rlbench.options import OptionError

OF_THE_CRITIC = ("critic_pretrain", "critic_lr", "betas", "weight_decay")
"""Options that act on the critic's optimizer alone, as the policy's is the session's."""


@dataclass(frozen=True)
class SessionEngine:
    """An engine of the session, by its name there, in the place of a folder."""

    name: str


@dataclass(frozen=True)
class TrainerSpec:
    """A trainer to be built on the ranks of a session.

    Attributes:
        path: folder of the actor's checkpoint, with its tokenizer; where critic and reference come from unless said.
        options: of `StrategyConfig` and `PPOConfig`, by name.
        trainer: the class, a subclass of `SPMDPPOTrainer`; None: that.
        critic, reference: folder of the checkpoint; True: `path`; None: none. A reference may be the session's own.
        value_head_prefix: what the critic's head is called in its checkpoint.
        reference_shard_size: ranks over which the reference's parameters are split; None: all.
        reward: see `PPOTrainer.reward_model`; a folder is that of a reward model.
        lr: learning rate; None: the actor's stays as it is.
        schedule_steps: optimizer steps over which the rates warm up and fall by a cosine; None: they stay.
        prompts, eval_prompts, loss, arguments: of the trainer.
    """

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: type | None = None
    critic: str | bool | None = None
    reference: str | bool | SessionEngine | None = None
    ema: bool = False
    reward: Any = None
    lr: float | None = None
    schedule_steps: int | None = None
    prompts: Any = None
    eval_prompts: Any = None
    loss: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    value_head_prefix: str | None = None
    reference_shard_size: int | None = None

    def __post_init__(self) -> None:
        for name in self.options:
            if name in OF_THE_CRITIC and not self.critic:
                raise OptionError(f"{name}={self.options[name]!r} would have no effect: there is no critic.")
            if name == "lr_warmup_ratio" and self.schedule_steps is None:
                raise OptionError("lr_warmup_ratio would have no effect: the rates stay. Give schedule_steps, too.")
        if self.value_head_prefix is not None and not self.critic:
            raise OptionError(f"value_head_prefix={self.value_head_prefix!r} would have no effect: there is no critic.")


@dataclass(frozen=True)
class TextSpec:
    """A trainer of texts to be built on the ranks of a session.

    Attributes:
        path: folder of the actor's checkpoint, with its tokenizer; where the reference comes from unless said.
        loss: pickled by value.
        texts, eval_texts: batches, or a stream of one.
        options: of `TextConfig` and `LoopOptions`, and those of `StrategyConfig` that act on texts, by name.
        reference: folder of the checkpoint; True: `path`; None: none. It may be the session's own.
        lr: learning rate; None: the actor's stays as it is.
        schedule_steps: optimizer steps over which the rate warms up and falls by a cosine; None: it stays.
    """

    path: str
    loss: bytes
    texts: TrainBatch | TextStream
    eval_texts: TrainBatch | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    reference: str | bool | SessionEngine | None = None
    lr: float | None = None
    schedule_steps: int | None = None

    def __post_init__(self) -> None:
        if "lr_warmup_ratio" in self.options and self.schedule_steps is None:
            raise OptionError("lr_warmup_ratio would have no effect: the rate stays. Give schedule_steps, too.")
