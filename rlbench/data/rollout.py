"""One completion and one prompt's completions, as `Rollouts` hands them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlbench.data.prompts import Prompt


@dataclass(frozen=True, eq=False)
class Rollout:
    """One completion. `logprobs` are the sampler's, one float per token; `group` is its prompt's index; `info` is what
    an environment left, its messages among it (`rlbench.data.turns`).
    """

    source: Prompt
    token_ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: str
    group: int
    index: int
    weight_version: int
    reward: float | None
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> Any:
        """The prompt as it was given: text, messages or token ids."""
        return self.source.content

    @property
    def label(self) -> Any:
        """The prompt's reference answer."""
        return self.source.label

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class PromptGroup:
    """One prompt and its completions."""

    source: Prompt
    prompt_token_ids: list[int]
    outputs: list[Rollout]
    group: int

    @property
    def prompt(self) -> Any:
        """The prompt as it was given: text, messages or token ids."""
        return self.source.content
