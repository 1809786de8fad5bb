"""The model, tokenizer and rows on which both systems compute; imports nothing of either.

Weights are a formula and not drawn, so that every version of torch makes the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

WORDS = ("<pad>", "<eos>", *(f"w{i}" for i in range(22)))
PAIRS = (
    {"prompt": "w1 w2 w3", "chosen": " w4 w5 w6 w7", "rejected": " w8 w9"},
    {"prompt": "w4 w9", "chosen": " w11", "rejected": " w12 w13 w14 w15 w3"},
    {"prompt": "w5 w5 w6 w20 w21", "chosen": " w16 w17 w2", "rejected": " w18 w1 w19"},
    {"prompt": "w7", "chosen": " w21 w20 w19 w18 w17 w16", "rejected": " w3 w2 w4 w4"},
)
MARGINS = (0.5, 0.0, 1.0, 2.0)


def config(**more: Any) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        attn_implementation="eager",
        **more,
    )


def language_model(phase: float = 0.0) -> Qwen2ForCausalLM:
    """700 parameters; another `phase` makes other weights, as a reference's or a teacher's."""
    return filled(Qwen2ForCausalLM(config()), phase)


def reward_model() -> Qwen2ForSequenceClassification:
    return filled(Qwen2ForSequenceClassification(config(num_labels=1)), 0.0)


def filled(model: Any, phase: float) -> Any:
    """Fill each parameter with a sine of its own; those of norms lie around 1."""
    with torch.no_grad():
        for k, (name, parameter) in enumerate(model.named_parameters()):
            wave = np.sin(np.arange(parameter.numel()) * (1.7 + 0.31 * k) + 0.9 * k + phase)
            values = 1 + 0.1 * wave if "norm" in name else 0.5 * wave
            parameter.copy_(torch.from_numpy(values.astype(np.float32)).reshape(parameter.shape))
    return model.float().eval()


def tokenizer() -> Any:
    """One token per word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="right")
