"""A trainer of a tiny model, as tests of its parts share it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlbench.data import PromptSet
from rlbench.strategies import get_fake_strategy
from rlbench.strategies.optim.optimizer_set import cosine_schedule
from rlbench.trainers import SPMDPPOTrainer, make_critic
from tests.trainers.making import LONGEST, TableEngine, asked, last_token, qwen_of

OPTIONS: dict[str, Any] = {
    "advantage_estimator": "group_norm",
    "n": 4,
    "micro_rollout_batch_size": 8,
    "train_batch_size": 16,
    "micro_train_batch_size": 4,
    "bf16": False,
}


class Synced(list[torch.Tensor]):
    """In the place of `strategy.update_engine_weights`: keeps one weight of each sync."""

    def __call__(self, actor: Any) -> dict[str, Any]:
        self.append(first_weight(actor))
        return {"version": len(self), "gap": 0.0}


def first_weight(model: Any) -> torch.Tensor:
    return next(iter(model.parameters())).detach().clone()


def trainer_of(qwen: str, **given: Any) -> SPMDPPOTrainer:
    """4 prompts of 4 samples an iteration: 16 sequences, one optimizer step."""
    strategy = get_fake_strategy({**OPTIONS, **given.pop("options", {})})
    strategy.gather_and_generate = TableEngine()  # type: ignore[method-assign]
    strategy.update_engine_weights = Synced()  # type: ignore[method-assign]
    actor = given.pop("actor", None) or qwen_of(qwen)
    chosen = {
        "rollout_batch_size": 4,
        "max_tokens": LONGEST,
        "prompt_max_len": 16,
        "kl_coef": 0.0,
        "prompts": PromptSet.of(asked(40)).stream(seed=3),
        **given,
    }
    kind = chosen.pop("kind", SPMDPPOTrainer)
    made: SPMDPPOTrainer = kind(
        strategy,
        actor,
        chosen.pop("critic", None),
        chosen.pop("reward", last_token),
        chosen.pop("reference", None),
        chosen.pop("ema", None),
        strategy.create_optimizer(actor, lr=1e-3, weight_decay=0.0),
        **chosen,
    )
    return made


class Digits:
    """A tokenizer whose tokens are their numbers."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(part) for part in text.split() if part.isdigit()] for text in texts]}

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(token)) for token in np.atleast_1d(ids))

    def convert_ids_to_tokens(self, ids: Any) -> list[str]:
        return [str(int(token)) for token in ids]

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        return [self.decode(row) for row in rows]


def with_critic(qwen: str, **given: Any) -> Any:
    strategy = get_fake_strategy()
    critic = strategy.prepare_model(make_critic(qwen), is_training=True)
    return trainer_of(
        qwen,
        options={"advantage_estimator": "gae"},
        critic=critic,
        critic_optim=strategy.create_optimizer(critic, lr=1e-3),
        **given,
    )


def whole_trainer(qwen: str, **options: Any) -> SPMDPPOTrainer:
    """With all that moves beside a policy: critic, average, schedules, a KL weight that adapts."""
    strategy = get_fake_strategy({**OPTIONS, "advantage_estimator": "gae", **options})
    strategy.gather_and_generate = TableEngine()  # type: ignore[method-assign]
    strategy.update_engine_weights = Synced()  # type: ignore[method-assign]
    actor, ema, reference = (qwen_of(qwen) for _ in range(3))
    critic = strategy.prepare_model(make_critic(qwen), is_training=True)
    own = [strategy.create_optimizer(model, lr=1e-2, weight_decay=0.0) for model in (actor, critic)]
    return SPMDPPOTrainer(
        strategy,
        actor,
        critic,
        last_token,
        reference,
        ema,
        *own,
        *(cosine_schedule(one, 20, 0.2) for one in own),
        prompts=PromptSet.of(asked(40)).stream(seed=3),
        rollout_batch_size=4,
        max_tokens=LONGEST,
        prompt_max_len=16,
        kl_coef=0.1,
        kl_target=0.01,
        kl_horizon=20,
    )


def everything(trainer: SPMDPPOTrainer) -> list[torch.Tensor]:
    return [t.clone() for model in (trainer.actor, trainer.critic, trainer.ema_model) for t in model.parameters()]


class Saved(Digits):
    """A tokenizer with a file of its own."""

    all_special_ids: tuple[int, ...] = ()

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "digits.txt").write_text("0123456789")
