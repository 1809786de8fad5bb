"""What goes to a replica and what comes back: one generate call, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.images import PlacedImage
from rlbench.data.prompts.prompt import Prompt

FINISH_REASONS: tuple[str, ...] = ("stop", "length", "abort")


@dataclass(frozen=True)
class EnvJob:
    """The environment that the samples of a call meet; `blob`: what makes one, by cloudpickle.

    `max_total_tokens`: of a whole response, sampled and observed. `timeout_s`: for one `reset` or `step`. `thoughts`:
    of earlier turns, "keep" or "strip".
    """

    blob: bytes
    max_turns: int = 1
    max_total_tokens: int | None = None
    timeout_s: float | None = None
    thoughts: str = "keep"


@dataclass(frozen=True, eq=False)
class GenerateJob:
    """One generate call.

    `prompts`: contents (text, chat messages or token ids). `n`: samples per prompt. `seeds`: (prompts, n) int64.
    `shared`: several replicas serve this job and claim prompts as they have room. `number` of the rollout and `asked`,
    its prompts with labels: kept with the result for a kernel that comes back, 0 and empty where none will ask again.
    `env`: what each sample meets turn by turn, `asked` then always given. `adapter`: number of the one that samples, 0
    for the base alone; None: what was synced last. `chat`: what the chat template is called with besides messages;
    `tools`: of each prompt, where prompts differ in the tools they name, else empty.
    `media`: images, videos or sounds of each prompt, empty where none has any. `told`: whether the progress has the
    texts so far, without `env`.
    """

    prompts: list[Any]
    n: int
    sampling: dict[str, Any]
    seeds: np.ndarray
    shared: bool = False
    number: int = 0
    asked: tuple[Prompt, ...] = ()
    env: EnvJob | None = None
    adapter: int | None = None
    chat: dict[str, Any] = field(default_factory=dict)
    tools: tuple[list[dict[str, Any]], ...] = ()
    media: tuple[tuple[EncodedMedia, ...], ...] = ()
    told: bool = False


@dataclass(frozen=True, eq=False)
class GeneratedArrays:
    """The samples one replica generated, in any order.

    `keys` (samples, 2) int32: prompt index, sample index. `token_ids` int32 and `logprobs` float32, flat over all
    samples; `offsets` (samples + 1,) int64. `finish` (samples,) int8 into FINISH_REASONS. `versions` (samples,) int64.
    With an environment: `mask` bool (False where it was observed, log-prob 0 there) and `turns` int32, flat beside the
    tokens; `turn_rewards` per sample and turn, NaN for none; `infos`, JSON types per sample; `observed_images` of each
    sample, by their places. None without. `routing`: where the engine gives it, see `data.base.routing`.
    """

    keys: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    offsets: np.ndarray
    finish: np.ndarray
    versions: np.ndarray
    texts: list[str]
    prompt_token_ids: dict[int, list[int]]
    stats: dict[str, float] = field(default_factory=dict)
    mask: np.ndarray | None = None
    turns: np.ndarray | None = None
    turn_rewards: list[list[float]] | None = None
    infos: list[dict[str, Any]] | None = None
    observed_images: list[tuple[PlacedImage, ...]] | None = None
    routing: Ragged | None = None
