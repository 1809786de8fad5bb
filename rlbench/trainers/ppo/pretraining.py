"""The text that a policy goes on being trained on beside its reward (`ptx_coef`; InstructGPT, arXiv 2203.02155)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlbench.data import Mixture, PromptSet, PromptStream, TextStream, TrainBatch, demonstrations
from rlbench.data.prompts.lengths import text_ids
from rlbench.data.texts.demonstrations import is_demonstration
from rlbench.strategies.options.config import OptionError

if TYPE_CHECKING:
    from rlbench.trainers.ppo.trainer import PPOTrainer
    from rlbench.trainers.update.experience_update import Text


class Pretraining:
    """Gives each optimizer step as many texts as it has sequences; none where there is no weight.

    `texts`: demonstrations (a batch, a stream of one, or rows), of which the assistant's tokens are trained; or plain
    texts, of which all are.
    """

    def __init__(self, trainer: PPOTrainer, texts: Any) -> None:
        coef = trainer.options.ppo.ptx_coef
        if (coef > 0) != (texts is not None):
            missing = "pretrain_prompts" if coef > 0 else "ptx_coef above 0"
            raise OptionError(f"ptx_coef={coef:g} and pretrain_prompts belong together: give {missing} too.")
        self._trainer = trainer
        self.stream: PromptStream | Mixture | TextStream | None = None
        if isinstance(texts, list | tuple) and texts and is_demonstration(texts[0]):
            texts = demonstrations(texts, trainer.tokenizer)
        if isinstance(texts, TrainBatch):
            if texts.preference is not None:
                raise OptionError("pretrain_prompts are demonstrations or texts, and these were compared or judged.")
            texts = texts.stream(seed=trainer.strategy.seed)
        if isinstance(texts, TextStream):
            self._check_lengths(texts.batch)
        if texts is not None:
            self.stream = texts if isinstance(texts, TextStream) else stream_of(texts, trainer.strategy.seed)

    def state(self) -> dict[str, Any] | None:
        """The place in the texts, as plain values; None without any."""
        return None if self.stream is None else self.stream.state()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go to where `state` was taken."""
        if state is not None and self.stream is not None:
            self.stream.restore(state)

    def texts(self, count: int) -> list[Text]:
        """Micro-batches of the next `count` texts of this rank; the stream is the same on all ranks."""
        if self.stream is None:
            return []
        options, strategy = self._trainer.options, self._trainer.strategy
        taken = self.stream.take(count * strategy.world_size)[strategy.rank * count : (strategy.rank + 1) * count]
        size = options.strategy.micro_train_batch_size
        if isinstance(taken, TrainBatch):
            return [taken[i : i + size] for i in range(0, len(taken), size)]
        limit = options.ppo.pretrain_max_len or options.ppo.prompt_max_len + options.ppo.max_tokens
        rows = [row[:limit] for row in text_ids([prompt.text for prompt in taken], self._trainer.tokenizer)]
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def _check_lengths(self, batch: TrainBatch) -> None:
        limit = self._trainer.options.ppo.pretrain_max_len
        longest = int(batch.lengths.max(initial=0))
        if limit is not None and longest > limit:
            raise OptionError(
                f"pretrain_max_len={limit}: the longest demonstration of pretrain_prompts has {longest} tokens, and an "
                "answer that is cut would not end. Leave out longer ones: rb.data.demonstrations(…, max_length=)."
            )


def stream_of(prompts: Any, seed: int) -> PromptStream | Mixture:
    """Prompts as something with a place: a stream stays what it is."""
    return prompts if isinstance(prompts, PromptStream | Mixture) else PromptSet.of(prompts).stream(seed=seed)
