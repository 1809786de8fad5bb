"""A sample played with an environment, without an engine: the policy says given texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle

from rlbench.data import Prompt
from rlbench.envs.episode import Episode, Limits
from rlbench.envs.protocol import resolved, unpacked


def begun(
    env: Any, prompt: Prompt, tokenizer: Any, max_turns: int = 8, total: int | None = None, thoughts: str = "keep"
) -> Episode:
    """One sample at its beginning, with an environment as a replica has it."""
    ids = [int(token) for token in tokenizer.apply_chat_template(prompt.content, add_generation_prompt=True).input_ids]
    limits = Limits(4000, max_turns, total, len(tokenizer), thoughts)
    make = unpacked(cloudpickle.dumps(env))
    episode = Episode(prompt, ids, limits, make, tokenizer, lambda ids: str(tokenizer.decode(ids)))
    episode.opened(resolved(episode.begin()))
    return episode


def play(env: Any, prompt: Prompt, said: Sequence[str], tokenizer: Any, **options: Any) -> Episode:
    """Play a sample of which the policy says these texts, one a turn, as a replica does."""
    episode = begun(env, prompt, tokenizer, **options)
    for text in said:
        ids = tokenizer(text).input_ids
        episode.extend(ids, [-1.0] * len(ids))
        if not episode.stepped(episode.env.step(episode.turn("stop")), "stop", False):
            break
    if episode.owes_reward:
        episode.paid(episode.env.end_reward())
    return episode
