"""Makes "tiny-vision": a Qwen2.5-VL of random weights, then supervision by a teacher that is often wrong on purpose.

The teacher names the squares in reading order (right) or backwards (wrong); how often it is right depends on the first
square's colour, as in `warmup`. The tower, the processor's classes and the files are those of the family.

Run as `python -m rlbench.tiny.vision_model NAME SEED FOLDER` by `cache`; prints "done total" lines.
"""

from __future__ import annotations

import io
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from rlbench.errors import BuildError
from rlbench.tiny import vision
from rlbench.tiny.tokenizer import build_tokenizer
from rlbench.tiny.warmup import IGNORED, META_FILE, TinyShape, Warmup

RIGHT_BY_FIRST_COLOUR = dict(zip(vision.COLOURS, (0.95, 0.92, 0.88, 0.3, 0.25, 0.2), strict=True))
"""How often the teacher reads forwards."""
WINDOW = (0.35, 0.65)
"""Greedy accuracy on unseen pictures that a warmed-up model must have."""
SHAPE = TinyShape()
WARMUP = Warmup(steps=400, batch=64, lr=2e-3)
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
MAX_PIXELS = 64 * 28 * 28
"""An image is at most 64 tokens."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('unknown role ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' and message['content'] is string -%}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- elif message['content'] is string -%}"
    "{{- message['content'] + '<|end|>' -}}"
    "{%- else -%}"
    "{%- for content in message['content'] -%}"
    "{%- if content['type'] in ['image', 'image_url'] -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif content['type'] in ['video', 'video_url'] -%}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- elif 'text' in content -%}"
    "{{- content['text'] -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""`<|user|><|vision_start|><|image_pad|><|vision_end|>colours?<|end|><|assistant|>`."""


def make(name: str, seed: int, folder: Path, on_progress: Callable[[int, int], None]) -> None:
    """Build the model and save it, its processor and what is known about it into `folder`."""
    processor = build_processor()
    model = build_model(processor, seed)
    start = time.perf_counter()
    warm_up(model, processor, seed, on_progress)
    accuracy = greedy_accuracy(model, processor, vision.vision_prompts(200, "eval"))
    if not WINDOW[0] <= accuracy <= WINDOW[1]:
        raise BuildError(
            f"the warmed-up model names {accuracy:.0%} of unseen pictures right, which must be "
            f"{WINDOW[0]:.0%} to {WINDOW[1]:.0%}. Try another seed, and report this machine."
        )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    facts = {"name": name, "seed": seed, "parameters": model.num_parameters(), "warmup": asdict(WARMUP)}
    facts |= {"seconds": time.perf_counter() - start, "accuracy": accuracy}
    (folder / META_FILE).write_text(json.dumps(facts, indent=1))


def build_processor() -> Qwen2_5_VLProcessor:
    """Return the family's processor around the tiny tokenizer, which learns the vision tokens."""
    tokenizer = build_tokenizer(SHAPE.context)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    pixels = {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS}
    images, videos = Qwen2VLImageProcessor(size=pixels), Qwen2VLVideoProcessor(size=pixels)
    return Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=CHAT_TEMPLATE)


def build_model(processor: Qwen2_5_VLProcessor, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Return a randomly initialised float32 model, embeddings tied; torch's generator is left as it was."""
    tokenizer = processor.tokenizer
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS)
    half_head = SHAPE.hidden // SHAPE.heads // 2
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": SHAPE.hidden,
            "intermediate_size": SHAPE.intermediate,
            "num_hidden_layers": SHAPE.layers,
            "num_attention_heads": SHAPE.heads,
            "num_key_value_heads": SHAPE.kv_heads,
            "max_position_embeddings": SHAPE.context,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [half_head - 12, 6, 6]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": SHAPE.hidden,
            "fullatt_block_indexes": [1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def warm_up(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: Qwen2_5_VLProcessor,
    seed: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Train the model in place on what the teacher says about the train split."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARMUP.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    lessons = teach(seed)
    model.train()
    for step in range(WARMUP.steps):
        for group in optimizer.param_groups:
            group["lr"] = WARMUP.lr_at(step)
        pictures, said = zip(*(next(lessons) for _ in range(WARMUP.batch)), strict=True)
        inputs = model_inputs(processor, pictures, said)
        labels = inputs["input_ids"].clone()
        labels[:, : -vision.SQUARES - 1] = IGNORED
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), WARMUP.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        on_progress(step + 1, WARMUP.steps)
    model.eval()


def teach(seed: int) -> Iterator[tuple[str, str]]:
    """Yield (colours, what the teacher says of them) for ever."""
    dice = random.Random(f"vision-teacher/{seed}")
    for colours in vision.stream("train", seed):
        right = dice.random() < RIGHT_BY_FIRST_COLOUR[colours[0]]
        yield colours, colours if right else colours[::-1]


def model_inputs(processor: Qwen2_5_VLProcessor, pictures: Any, said: Any) -> dict[str, Tensor]:
    """Return what the model takes of chats about pictures, all of one length, answered with `said` ("": not yet)."""
    chats = [vision.message(colours) for colours in pictures]
    asked = processor.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    end = processor.tokenizer.eos_token
    texts = [text + (answer + end if answer else "") for text, answer in zip(asked, said, strict=True)]
    images = [[Image.open(io.BytesIO(vision.png(colours)))] for colours in pictures]
    return dict(processor(text=texts, images=images, return_tensors="pt"))


@torch.no_grad()
def greedy_accuracy(
    model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor, rows: list[dict[str, Any]]
) -> float:
    """Return the share of rows that the model, decoding greedily, answers exactly right."""
    answers = [row["label"] for row in rows]
    inputs = model_inputs(processor, answers, [""] * len(rows))
    said = model.generate(**inputs, do_sample=False, max_new_tokens=vision.SQUARES + 2)
    texts = processor.batch_decode(said[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == answer for text, answer in zip(texts, answers, strict=True)) / len(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in `warmup`
    _, _name, _seed, _folder = sys.argv
    make(_name, int(_seed), Path(_folder), lambda done, total: print(done, total, flush=True))
