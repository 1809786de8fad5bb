"""The settings of the demo, found by experiment; the notebooks, the examples and the tests use these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GrpoRecipe:
    """GRPO on the tiny model: one optimizer step per batch, advantages normalised by group, no KL, AdamW.

    Measured with `benchmarks/handwritten_loop.py` on seeds 0 to 4: greedy accuracy on unseen prompts goes from 0.27
    over 0.90 within 15 to 20 steps and ends above 0.94; with shuffled advantages it never rises. `collapse_lr` ruins
    the model within a few steps, to show what that looks like; the longest right answer has 9 tokens.
    """

    prompts_per_step: int = 32
    n: int = 8
    max_tokens: int = 12
    temperature: float = 1.0
    steps: int = 30
    lr: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    collapse_lr: float = 2e-3
    eval_prompts: int = 256
