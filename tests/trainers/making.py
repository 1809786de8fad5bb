"""What the tests of experience share: an engine that draws from a table, and makers around it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import Qwen2ForCausalLM

from rlbench.data.prompts.prompt import Prompt
from rlbench.strategies.generation.engine import GenerateOutput
from rlbench.strategies.options.config import StrategyConfig
from rlbench.trainers.experience.maker import FastExperienceMaker
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.options.ppo_config import PPOConfig
from tests.modules import VOCAB

LONGEST = 12
GRPO = {"advantage_estimator": "group_norm", "n": 4, "micro_rollout_batch_size": 3}


class TableEngine:
    """In the place of `strategy.gather_and_generate`: what it draws depends on the prompt and the sample's number,
    not of the rank. `calls` keeps what was asked."""

    def __init__(self, finish: Callable[[int], str] | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self._finish = finish

    def __call__(
        self, sampling_params: dict[str, Any], all_prompts: list[Prompt], sleep_engine: bool = True
    ) -> list[GenerateOutput]:
        self.calls.append({"sampling": sampling_params, "prompts": list(all_prompts), "sleep": sleep_engine})
        return [
            self._drawn(prompt, sample, sampling_params["max_tokens"])
            for prompt in all_prompts
            for sample in range(sampling_params["n"])
        ]

    def _drawn(self, prompt: Prompt, sample: int, most: int) -> GenerateOutput:
        rng = np.random.default_rng([zlib.crc32(repr(prompt.content).encode()), sample])
        count = int(rng.integers(1, most + 1))
        reason = "length" if count == most else "stop"
        if self._finish is not None:
            reason = self._finish(len(self.calls)) or reason
        tokens = rng.integers(0, VOCAB, count).tolist()
        return GenerateOutput(
            list(prompt.content),
            tokens,
            (-4.5 + 0.3 * rng.normal(size=count)).astype(np.float32),
            reason,
            " ".join(map(str, tokens)),
            7,
        )


def asked(count: int, seed: int = 0, **own: Any) -> list[Prompt]:
    """Prompts of token ids, of different lengths."""
    rng = np.random.default_rng(seed)
    return [Prompt(rng.integers(0, VOCAB, int(rng.integers(2, 7))).tolist(), **own) for _ in range(count)]


def last_token(rollout: Any) -> float:
    """A reward that any code can say again: of the last token."""
    return float(rollout.token_ids[-1] % 10)


def qwen_of(path: str) -> Any:
    return Qwen2ForCausalLM.from_pretrained(path)


def maker_of(
    strategy: Any,
    actor: Any,
    reward: Any = last_token,
    options: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **given: Any,
) -> FastExperienceMaker:
    """A maker of GRPO without a reference around a strategy that draws from a `TableEngine`, unless told otherwise."""
    if "gather_and_generate" not in vars(strategy):
        strategy.gather_and_generate = TableEngine()
    ours = PPOConfig(**{"kl_coef": 0.0, "max_tokens": LONGEST, "prompt_max_len": 16, **(config or {})})
    return FastExperienceMaker(
        actor,
        given.pop("critic", None),
        reward,
        given.pop("initial_model", None),
        given.pop("tokenizer", None),
        ours.prompt_max_len,
        given.pop("kl_ctl", None),
        strategy,
        options=StrategyConfig(**{**GRPO, **(options or {})}),
        config=ours,
        **given,
    )


def rows_of(experience: Experience, flat: np.ndarray) -> list[np.ndarray]:
    """Flat numbers beside response tokens, sequence by sequence."""
    return list(experience.batch.responses.with_values(flat))


def joined(made: list[Experience]) -> Experience:
    return Experience.joined(made)
