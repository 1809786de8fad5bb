"""Makes a tiny model: random weights, then supervision by a teacher that is often wrong on purpose.

The teacher sorts digits upwards (right) or downwards (wrong); how often it is right depends on the first
digit. So the warmed-up model can do both well, and greedily is right for three first digits in ten:
reinforcement learning has a mode to select, prompt by prompt, and finds right answers everywhere by sampling.

Run as `python -m rlbench.tiny.warmup NAME SEED FOLDER` by `cache`; prints "done total" lines.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from rlbench.errors import BuildError
from rlbench.tiny import tasks
from rlbench.tiny.tokenizer import build_tokenizer

RIGHT_BY_FIRST_DIGIT = (0.95, 0.92, 0.88, 0.25, 0.2, 0.18, 0.15, 0.12, 0.1, 0.08)
"""How often the teacher sorts upwards. Far enough from one half that noise alone does not change the model's mind."""
WINDOW = (0.15, 0.40)
"""Greedy accuracy on unseen prompts that a warmed-up model must have."""
META_FILE = "rlbench_tiny.json"
IGNORED = -100


@dataclass(frozen=True)
class TinyShape:
    """Size of the model; hidden / heads must be >= 32, which vLLM's CPU attention needs; `context` is in tokens."""

    hidden: int = 128
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    context: int = 2048


@dataclass(frozen=True)
class Warmup:
    """AdamW on the teacher's answers: linear warm-up over 20 steps to `lr`, linear decay over the last 40 %."""

    steps: int = 300
    batch: int = 64
    lr: float = 2e-3
    grad_clip: float = 1.0

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rising, falling = (step + 1) / 20, (self.steps - step) / (0.4 * self.steps)
        return self.lr * min(1.0, rising, falling)


SHAPES = {"tiny": TinyShape(), "bench-10m": TinyShape(hidden=320, intermediate=960, layers=8, heads=10, kv_heads=5)}
WARMUPS = {"tiny": Warmup()}


def make(name: str, seed: int, folder: Path, on_progress: Callable[[int, int], None]) -> None:
    """Build the model `name` and save it, its tokenizer and what is known about it into `folder`."""
    shape, warmup = SHAPES[name], WARMUPS.get(name)
    tokenizer = build_tokenizer(shape.context)
    model = build_model(shape, tokenizer, seed)
    facts: dict[str, object] = {"name": name, "seed": seed, "parameters": model.num_parameters()}
    if warmup is not None:
        start = time.perf_counter()
        warm_up(model, tokenizer, warmup, seed, on_progress)
        accuracy = greedy_accuracy(model, tokenizer, tasks.prompts(256, "eval", seed=0))
        facts |= {"warmup": asdict(warmup), "seconds": time.perf_counter() - start, "accuracy": accuracy}
        if not WINDOW[0] <= accuracy <= WINDOW[1]:
            raise BuildError(
                f"the warmed-up model answers {accuracy:.0%} of unseen prompts right, which must be "
                f"{WINDOW[0]:.0%} to {WINDOW[1]:.0%}. Try another seed, and report this machine."
            )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / META_FILE).write_text(json.dumps(facts, indent=1))


def build_model(
    shape: TinyShape, tokenizer: PreTrainedTokenizerBase, seed: int, vocabulary: int | None = None
) -> Qwen2ForCausalLM:
    """Return a randomly initialised float32 model, embeddings tied, of `vocabulary` tokens (None: the tokenizer's);
    torch's generator is left as it was."""
    config = Qwen2Config(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    warmup: Warmup,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Train the model in place on what the teacher says about the train split."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=warmup.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    examples = teach(tokenizer, seed)
    model.train()
    for step in range(warmup.steps):
        for group in optimizer.param_groups:
            group["lr"] = warmup.lr_at(step)
        input_ids, labels = collate([next(examples) for _ in range(warmup.batch)], tokenizer)
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), warmup.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        on_progress(step + 1, warmup.steps)
    model.eval()


def teach(tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (prompt tokens, answer tokens) of the teacher for ever."""
    dice = random.Random(f"teacher/{seed}")
    for digits in tasks.stream("train", seed):
        right = dice.random() < RIGHT_BY_FIRST_DIGIT[int(digits[0])]
        said = "".join(sorted(digits, reverse=not right))
        yield prompt_ids(tokenizer, tasks.message(digits)), [*tokenizer.encode(said), tokenizer.eos_token_id]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: tasks.Messages) -> list[int]:
    """Return the tokens of a chat prompt, up to where the assistant speaks."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def collate(examples: list[tuple[list[int], list[int]]], tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Return input ids and labels, (examples, tokens) int64, padded on the right; prompts have no label."""
    width = max(len(prompt) + len(said) for prompt, said in examples)
    input_ids = torch.full((len(examples), width), tokenizer.pad_token_id)
    labels = torch.full((len(examples), width), IGNORED)
    for row, (prompt, said) in enumerate(examples):
        end = len(prompt) + len(said)
        input_ids[row, :end] = torch.tensor(prompt + said)
        labels[row, len(prompt) : end] = torch.tensor(said)
    return input_ids, labels


@torch.no_grad()
def greedy_accuracy(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[tasks.Messages]
) -> float:
    """Return the share of prompts that the model, decoding greedily, answers exactly right."""
    encoded = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    answers = [[*tokenizer.encode(tasks.answer(prompt)), tokenizer.eos_token_id] for prompt in prompts]
    right = 0
    for length in sorted({len(ids) for ids in encoded}):  # prompts of one length need no padding
        rows = [row for row, ids in enumerate(encoded) if len(ids) == length]
        tokens = torch.tensor([encoded[row] for row in rows])
        for _ in range(len(answers[rows[0]])):
            following = model(input_ids=tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        said = tokens[:, length:].tolist()
        right += sum(said[i] == answers[row] for i, row in enumerate(rows))
    return right / len(prompts)


if __name__ == "__main__":
    torch.set_num_threads(1)  # steps this small gain little from a second, and lose much where cores are busy
    _, _name, _seed, _folder = sys.argv
    make(_name, int(_seed), Path(_folder), lambda done, total: print(done, total, flush=True))
