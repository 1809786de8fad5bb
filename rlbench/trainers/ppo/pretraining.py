"""The text that a policy goes on being trained on beside its reward (`ptx_coef`; InstructGPT, arXiv 2203.02155)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlbench.data import Mixture, PromptSet, PromptStream
from rlbench.strategies.options.config import OptionError

if TYPE_CHECKING:
    from rlbench.trainers.ppo.trainer import PPOTrainer


@dataclass(frozen=True)
class Pretraining:
    """Gives each optimizer step as many texts as it has sequences; none where there is no weight.

    Attributes:
        stream: of the texts; the same on all ranks, each takes its part.
        rank, world_size: of this rank.
        size: texts of one micro-batch.
        limit: tokens kept of a text.
        tokenizer: the policy's.
    """

    stream: PromptStream | Mixture | None
    rank: int = 0
    world_size: int = 1
    size: int = 1
    limit: int = 0
    tokenizer: Any = None

    @classmethod
    def of(cls, trainer: PPOTrainer, coef: float) -> Pretraining:
        """Of a trainer's `pretrain_prompts`.

        Raises:
            OptionError: texts without a weight, or a weight without texts.
        """
        given = trainer.pretrain_prompts
        if (coef > 0) != (given is not None):
            missing = "pretrain_prompts" if coef > 0 else "ptx_coef above 0"
            raise OptionError(f"ptx_coef={coef:g} and pretrain_prompts belong together: give {missing} too.")
        if given is None:
            return cls(None)
        ppo, strategy = trainer.options.ppo, trainer.strategy
        stream = given if isinstance(given, PromptStream | Mixture) else PromptSet.of(given).stream(strategy.seed)
        return cls(
            stream,
            strategy.rank,
            strategy.world_size,
            trainer.options.strategy.micro_train_batch_size,
            ppo.prompt_max_len + ppo.max_tokens,
            trainer.tokenizer,
        )

    def state(self) -> dict[str, Any] | None:
        """The place in the texts, as plain values; None without any."""
        return None if self.stream is None else self.stream.state()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go to where `state` was taken."""
        if state is not None and self.stream is not None:
            self.stream.restore(state)

    def texts(self, count: int) -> list[list[list[int]]]:
        """Micro-batches of the next `count` texts of this rank, as token ids."""
        if self.stream is None:
            return []
        taken = self.stream.take(count * self.world_size)[self.rank * count : (self.rank + 1) * count]
        rows = [self.tokenizer(prompt.text)["input_ids"][: self.limit] for prompt in taken]
        return [rows[i : i + self.size] for i in range(0, len(rows), self.size)]
