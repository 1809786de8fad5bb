"""A tiny Qwen2 checkpoint with a byte-level tokenizer, written to a folder: real files, made in well under a
second.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (256) plus three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(tied: bool, layers: int = 2, hidden: int = 128) -> Qwen2Config:
    """A Qwen2 of about 0.4 M parameters, head_dim 32 (vLLM's CPU attention needs at least 32)."""
    tokens = byte_tokenizer()
    return Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        bos_token_id=None,
    )


def make_checkpoint(folder: Path, tied: bool = True, seed: int = 0) -> Path:
    """Write a random model (float32, logits spread widely enough to be told apart) with its tokenizer."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(tiny_config(tied)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.08)
            elif "bias" in name:
                parameter.normal_(0.0, 0.05)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def hf_logprobs(model: torch.nn.Module, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log p(token t | tokens < t) for t >= 1 by the transformers model, float32 (len - 1,)."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logits = model(tokens).logits[0, :-1].float() / temperature
    found: np.ndarray = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].numpy()
    return found
