"""A trainer of texts from a description: what `session.trainer` and the command line send to every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rlbench.data import TextStream, TrainBatch
from rlbench.options import OptionError, options_in
from rlbench.strategies.optim.optimizer_set import cosine_schedule
from rlbench.trainers.options.loop_options import LoopOptions
from rlbench.trainers.options.text_config import TextConfig
from rlbench.trainers.ppo.building import (
    SessionEngine,
    actor_kept_on_failure,
    reference_of,
    set_rate,
    strategy_of,
)
from rlbench.trainers.texts.trainer import SPMDTextTrainer


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


def build_text_trainer(
    module: nn.Module,
    optimizer: Any,
    spec: TextSpec,
    half: torch.dtype | None,
    left_loaded: Callable[[], None] = lambda: None,
) -> SPMDTextTrainer:
    """The trainer of `spec` around a session's sharded module; collective. See `build_trainer`."""
    from transformers import AutoTokenizer

    strategy = strategy_of(module, optimizer, spec.options, half)
    with actor_kept_on_failure(module, optimizer):
        if spec.lr is not None:
            set_rate(optimizer, spec.lr)
        steps, warmup = spec.schedule_steps, strategy.config.lr_warmup_ratio
        trainer = SPMDTextTrainer(
            strategy,
            module,
            optimizer,
            spec.loss,
            spec.texts,
            actor_scheduler=None if steps is None else cosine_schedule(optimizer, steps, warmup),
            reference=reference_of(strategy, module, spec.path, spec.reference),
            eval_texts=spec.eval_texts,
            tokenizer=AutoTokenizer.from_pretrained(spec.path),
            **{name: value for name, value in spec.options.items() if name in options_in(TextConfig, LoopOptions)},
        )
        if trainer.options.loop.load_checkpoint:
            try:
                trainer.files.load_newest()
            except BaseException:
                if trainer.unsent:
                    left_loaded()
                raise
    return trainer
