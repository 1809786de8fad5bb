"""An environment as one writes it for TRL's `environment_factory`; nothing of rlbench is in it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

ASKED = [{"role": "user", "content": "Guess. "}]


class GuessEnv:
    """A number is looked for, in as few guesses as can be."""

    def __init__(self) -> None:
        self.reward = 0.0
        self.lock = asyncio.Lock()  # which no pickle takes

    def reset(self, secret: int, **columns: Any) -> str | None:
        self.secret, self.columns = secret, columns
        self.guesses: list[int] = []
        self.reward = 0.0
        return None if columns.get("quiet") else "It is below 10."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: What you think it is.

        Returns:
            How it compares with the number.
        """
        if self.reward:
            raise ValueError("Game over.")
        self.guesses.append(number)
        if number == self.secret:
            self.reward = 1.0 / len(self.guesses)
        return "right" if self.reward else "too low" if number < self.secret else "too high"

    async def hint(self, kind: str = "parity") -> dict:
        """
        Ask for a hint.

        Args:
            kind: What about: "parity" or "size".

        Returns:
            The hint, by its kind.
        """
        async with self.lock:
            await asyncio.sleep(0)
            return {kind: {"parity": self.secret % 2, "size": self.secret > 5}[kind]}

    def _helper(self) -> None:
        """Not for the policy."""


def reward_func(environments: list[GuessEnv], **kwargs: Any) -> list[float]:
    """The reward of TRL's own documentation."""
    return [env.reward for env in environments]


def call(name: str, **arguments: Any) -> str:
    """A call as Qwen's models write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
