"""Models and batches of the training tests: a tiny Qwen2 on disk, a model that is not from transformers,
batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import rlbench.nn
from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.batch import TrainBatch

VOCAB = 96


def save_qwen(folder: Path, tied: bool = True, dtype: torch.dtype = torch.float32) -> str:
    """A Qwen2 of 40 k parameters; returns its folder."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(dtype).save_pretrained(folder)
    return str(folder)


class TrainedQwen(rlbench.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """What a user writes: a step by hand, and helpers the tests look through."""

    def on_weights_materialized(self) -> None:
        self.optimizer = self.strategy.create_optimizer(self, lr=1e-2, weight_decay=0.0)

    def train_step(self, input_ids: list[list[int]], scale: float = 1.0) -> float:
        """One backward of the language loss."""
        ids = torch.tensor(input_ids, device=self.device)
        logits = self(ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) * scale
        self.strategy.backward(loss, self, self.optimizer)
        return float(loss.detach())

    def optimizer_step(self) -> dict[str, Any]:
        return dict(self.strategy.optimizer_step(self.optimizer, self, None))

    def through_forward(self, input_ids: list[list[int]]) -> Any:
        return self.forward(torch.tensor(input_ids))

    def fails_on(self, rank: int) -> int:
        if self.rank == rank:
            raise ValueError("my own mistake")
        return self.rank

    def where(self) -> tuple[int, int, str]:
        return self.rank, self.world_size, str(self.device)


def qwen_on_meta(path: str, cls: type = TrainedQwen) -> Any:
    with rlbench.nn.device("meta"):
        return cls.from_pretrained(path)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(1, x.shape[1] + 1, device=x.device)[None, :, None]
        return x + torch.tanh(self.mix(x.cumsum(1) / steps))


class RunningMeanModel(rlbench.nn.Fsdp2TrainModule):
    """A causal model with recurrence over the whole past, so it cannot be packed."""

    def __init__(self, width: int = 16, source: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, VOCAB)
        self.register_buffer("scale", torch.tensor(0.5))
        self.source = source

    @property
    def non_split_modules(self) -> set[type[nn.Module]]:
        return {Block}

    def materialization_source(self) -> Any:
        return self.source

    def on_weights_materialized(self) -> None:
        self.optimizer = self.strategy.create_optimizer(self, lr=1e-2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(lengths: list[tuple[int, int]], seed: int = 0, **fields: Any) -> TrainBatch:
    """Random sequences of (prompt, response) lengths, with advantages, sampler log-probs and a ragged
    mask."""
    rng = np.random.default_rng(seed)
    prompts = Ragged.from_rows([rng.integers(0, VOCAB, p) for p, _ in lengths], np.int32)
    responses = Ragged.from_rows([rng.integers(0, VOCAB, r) for _, r in lengths], np.int32)
    total = len(responses.values)
    mask = rng.random(total) > 0.1
    return TrainBatch(
        prompts=prompts,
        responses=responses,
        mask=mask,
        advantages=rng.normal(size=total).astype(np.float32),
        sampler_logprobs=(-4.5 + 0.1 * rng.normal(size=total)).astype(np.float32),
        group=np.zeros(len(lengths), np.int32),
        weight_version=np.zeros(len(lengths), np.int64),
        **fields,
    )


RAGGED = [(3, 9), (7, 2), (4, 17), (5, 5), (2, 12), (6, 5), (9, 1)]


def beginning_tokenizer(context: int = 512) -> Any:
    """Return the tiny tokenizer with a begin token, which it puts before texts as its chat template does itself."""
    from tokenizers.processors import TemplateProcessing

    from rlbench.tiny.tokenizer import PAD, build_tokenizer

    tokenizer = build_tokenizer(context)
    tokenizer.bos_token = PAD
    begin = [(PAD, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{PAD} $A", special_tokens=begin)
    tokenizer.chat_template = "{{- bos_token -}}" + tokenizer.chat_template
    return tokenizer
