"""Tiny models and a verifiable task, made on the spot: for the embedded default, the demo and the tests.

`ensure("tiny")` returns the folder of a small Qwen2 that sorts digits right about three times in ten; GRPO
with the settings of `recipe` lifts that above nine in ten within a minute or two on two cores. `ensure("tiny-vision")`
is a small Qwen2.5-VL that names the colours of a picture's squares as well as that.
"""

from dataclasses import dataclass

from rlbench.tiny import tasks
from rlbench.tiny.cache import cache_folder, ensure
from rlbench.tiny.vision import vision_prompts, vision_reward


@dataclass(frozen=True)
class GrpoRecipe:
    """GRPO on the tiny model: one optimizer step per batch, advantages normalised by group, no KL, AdamW.

    Measured with `benchmarks/handwritten_loop.py` on seeds 0 to 4: greedy accuracy on unseen prompts goes from 0.27
    over 0.90 within 15 to 20 steps and ends above 0.94; with shuffled advantages it never rises. `collapse_lr` ruins
    the model within a few steps, to show what that looks like; the longest right answer has 9 tokens. `lora_lr` is for
    adapters of rank 8 in all linear layers, as measured in docs/lora.md.
    """

    prompts_per_step: int = 32
    n: int = 8
    max_tokens: int = 12
    temperature: float = 1.0
    steps: int = 30
    lr: float = 5e-5
    lora_lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    collapse_lr: float = 2e-3
    eval_prompts: int = 256


recipe = GrpoRecipe()
"""The settings with which GRPO reliably improves the tiny model."""

__all__ = ["cache_folder", "ensure", "recipe", "tasks", "vision_prompts", "vision_reward"]
