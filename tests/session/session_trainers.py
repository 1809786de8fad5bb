"""Trainers of a session."""

import rlbench as rb
from rlbench.tiny import tasks

OPTIONS = {
    "rollout_batch_size": 8,
    "n": 4,
    "train_batch_size": 32,
    "micro_train_batch_size": 8,
    "micro_rollout_batch_size": 16,
    "max_tokens": 10,
    "packing": True,
    "seed": 3,
}


def prompts(count=64, seed=3):
    return rb.data.PromptSet.of(tasks.prompts(count, seed=seed)).stream(seed=seed)


def grpo(session, **given):
    """A trainer whose steps are one micro-batch on each of two ranks."""
    asked = given.pop("prompts", None) or prompts()
    options = {**OPTIONS, "micro_train_batch_size": 16, **given}
    return session.trainer("grpo", asked, tasks.reward, **options)


def drop_trainer(session):
    """Take the trainer off the ranks: it is no part of a snapshot of before it, whose restore would warn of it."""
    session.train.call_all("drop_trainer").result()
    session.core.trainer = None


def checksum():
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters())
    return float(sum(p.detach().double().sum() for p in whole))
