"""Which reward models a trainer's ranks hold, of what it is given as its reward, and how."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlbench import rewards
from rlbench.data.prompts.lengths import open_tokenizer
from rlbench.errors import DataError
from rlbench.session.planning.request import PlannedReward


def reward_models(reward: Any) -> Iterator[PlannedReward | rewards.model]:
    """Yield the reward models in what a trainer is given: folders, `rb.rewards.model`, and those in a list."""
    if isinstance(reward, list | tuple):
        for one in reward:
            yield from reward_models(one)
    elif isinstance(reward, rewards.model):
        yield reward
    elif isinstance(reward, str | Path) and Path(reward).is_dir():
        yield PlannedReward(str(reward))


def planned_reward(reward: PlannedReward | rewards.model, policy: str) -> PlannedReward:
    """How the ranks of a trainer of `policy` hold one: `rb.rewards.model` split over them where it reads what was
    sampled, else each whole. That is seen by the tokenizers, which it opens."""
    if isinstance(reward, PlannedReward):
        return reward
    path = str(reward.path)
    if reward.as_sampled and _reads_tokens_of(reward, policy):
        return PlannedReward(path)
    return PlannedReward(path, reward.dtype, reward.batch_size, on_host=str(reward.device or "").startswith("cpu"))


def _reads_tokens_of(reward: rewards.model, policy: str) -> bool:
    """Whether it has the policy's vocabulary; taken to be so where a tokenizer is not here to look at."""
    folders = [Path(path) for path in (policy, reward.path) if Path(path).is_dir()]
    if not all(any(folder.glob("tokenizer*")) for folder in folders):  # transformers makes an empty one
        return True
    try:
        tokenizer = open_tokenizer(policy)
        open_tokenizer(reward.path)
    except DataError:
        return True
    return reward.shares_vocabulary(tokenizer)
