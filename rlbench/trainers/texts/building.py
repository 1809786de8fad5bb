"""A trainer of texts from a description: what `session.trainer` and the command line send to every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rlbench.options import options_in
from rlbench.strategies.optim.optimizer_set import cosine_schedule
from rlbench.trainers.options.loop_options import LoopOptions
from rlbench.trainers.options.specs import TextSpec
from rlbench.trainers.options.text_config import TextConfig
from rlbench.trainers.ppo.building import (
    actor_kept_on_failure,
    reference_of,
    set_rate,
    strategy_of,
)
from rlbench.trainers.texts.trainer import SPMDTextTrainer


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
