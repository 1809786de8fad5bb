"""One completion and one prompt's completions, as `Rollouts` hands them out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlbench.data.prompts.images import EncodedImage, PlacedImage, counted_from
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.prompts.videos import EncodedVideo
from rlbench.data.rollouts.jobs import FINISH_REASONS
from rlbench.data.rollouts.turns import conversation, own_turns
from rlbench.errors import Suggesting
from rlbench.units import format_number

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts

SHOWN = 60
"""Characters of a text in a `repr`."""


@dataclass(frozen=True, eq=False)
class Asked(Suggesting):
    """What was asked, as completions of it hand it out."""

    source: Prompt

    @property
    def prompt(self) -> Any:
        """The prompt as it was given: text, messages or token ids."""
        return self.source.content

    @property
    def label(self) -> Any:
        """The prompt's reference answer."""
        return self.source.label

    @property
    def sounds(self) -> tuple[EncodedSound, ...]:
        """The prompt's sounds; `.samples(rate)` of one decodes it."""
        return self.source.sounds

    @property
    def videos(self) -> tuple[EncodedVideo, ...]:
        """The prompt's videos; `.pixels(indices)` of one decodes frames."""
        return self.source.videos

    @property
    def images(self) -> tuple[EncodedImage, ...]:
        """The prompt's images; `.pil()` of one decodes it."""
        return self.source.images


@dataclass(frozen=True, eq=False)
class Rollout(Asked):
    """One completion. `transcript` is all of it as text; where there was an environment or an agent, what those said
    too. What the policy itself said: `text` in all turns, `turns` one by one, `answer` in the last.

    `logprobs` are the sampler's, one float per token; `group` is its prompt's index; `info` is what an environment
    left, its messages among it (`rlbench.data.rollouts.turns`); `prompt_token_ids` what it followed; `tokenizer`: the
    folder or hub id of whose tokens these are, "" where not known. `observed_images`: what the environment showed, each
    `at` its token.
    """

    token_ids: list[int]
    transcript: str
    logprobs: list[float]
    finish_reason: str
    group: int
    index: int
    weight_version: int
    reward: float | None
    info: Mapping[str, Any] = field(default_factory=dict)
    prompt_token_ids: np.ndarray | Sequence[int] = ()
    tokenizer: str = ""
    observed_images: tuple[PlacedImage, ...] = ()

    @property
    def all_images(self) -> tuple[EncodedImage, ...]:
        """The prompt's images, then the observed ones, whose `at` counts from the prompt's first token here."""
        return (*self.images, *counted_from(self.observed_images, -len(self.prompt_token_ids)))

    @property
    def turns(self) -> tuple[str, ...]:
        """What the policy said, turn by turn; one of a completion without an environment."""
        return own_turns(self.info, self.transcript)

    @property
    def text(self) -> str:
        """What the policy said in all of its turns, a line break between two; never what an environment said."""
        return "\n".join(self.turns)

    @property
    def answer(self) -> str:
        """What the policy said in its last turn; "" where it said nothing."""
        return next(reversed(self.turns), "")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation: the prompt's messages, then the policy's and the environment's in their order."""
        return conversation(self.source, self.info, self.transcript)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        reward = "" if self.reward is None else f", reward {format_number(self.reward)}"
        ended = f"{self.finish_reason}, v{self.weight_version}"
        return f"Rollout({_head(self.text)}, {len(self):,} tokens, {ended}{reward})"


@dataclass(frozen=True, eq=False)
class PromptGroup(Asked):
    """One prompt and its completions, a `Rollout` each: a sequence of them, which `.outputs` is as a list."""

    _ELSEWHERE: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("token_ids", "text", "answer", "turns", "transcript", "messages", "logprobs", "finish_reason"),
            *("index", "weight_version", "reward", "info"),
        ),
        "a group is one prompt; its completions, which have it, are in .outputs, and those of all prompts in "
        "rollouts.flat",
    )

    prompt_token_ids: list[int]
    outputs: list[Rollout]
    group: int

    def __len__(self) -> int:
        return len(self.outputs)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.outputs)

    def __getitem__(self, index: int | slice) -> Any:
        return self.outputs[index]

    @property
    def rewards(self) -> np.ndarray:
        """The completions' rewards, (n,) float64; NaN where there is none."""
        return np.array([np.nan if one.reward is None else one.reward for one in self.outputs])

    def __repr__(self) -> str:
        count = len(self.outputs)
        return f"PromptGroup({_head(self.source.text)}, {count} completion{'' if count == 1 else 's'} in .outputs)"


def completions(rollouts: Rollouts, first: int, last: int) -> Iterator[Rollout]:
    """Yield those from `first` to before `last`; columns become Python's numbers at once, tokens one by one."""
    group, finish, versions = (getattr(rollouts, name)[first:last].tolist() for name in ("group", "finish", "versions"))
    rewards = [None] * (last - first) if rollouts.rewards is None else np.asarray(rollouts.rewards)[first:last].tolist()
    offsets = rollouts.responses.offsets[first : last + 1].tolist()
    for k, i in enumerate(range(first, last)):
        begin, end, reward = offsets[k], offsets[k + 1], rewards[k]
        yield Rollout(
            source=rollouts.prompts[group[k]],
            token_ids=rollouts.responses.values[begin:end].tolist(),
            transcript=rollouts.texts[i],
            logprobs=rollouts.logprobs[begin:end].tolist(),
            finish_reason=FINISH_REASONS[finish[k]],
            group=group[k],
            index=i,
            weight_version=versions[k],
            reward=None if reward is None or math.isnan(reward) else float(reward),
            info=rollouts.infos[i] if rollouts.infos else {},
            observed_images=rollouts.observed_images[i] if rollouts.observed_images else (),
            prompt_token_ids=rollouts.prompt_ids[group[k]],
            tokenizer=rollouts.tokenizer,
        )


def _head(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")
