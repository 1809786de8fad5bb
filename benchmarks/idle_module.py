"""A module of the tiny model with a method that does nothing, as a user would write it: what a call costs by itself."""

from __future__ import annotations

from transformers import Qwen2ForCausalLM

import rlbench as rb


class IdleModule(rb.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Qwen2 and a method that does nothing."""

    def nothing(self) -> None:
        """Return at once."""
