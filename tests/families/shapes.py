"""A config of each causal-LM family that transformers and vLLM share, small enough to build in a second."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SMALL = {
    "vocab_size": 259,
    "hidden_size": 128,
    "n_embd": 128,
    "d_model": 128,
    "word_embed_proj_dim": 128,
    "intermediate_size": 256,
    "ffn_dim": 256,
    "n_inner": 256,
    "ffn_hidden_size": 256,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "max_seq_len": 512,
    "max_sequence_length": 512,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
ALWAYS = ("pad_token_id", "bos_token_id", "eos_token_id", "head_dim", "num_key_value_heads")
"""What is set also where the family's own default is None."""
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_key_value_heads": 4}
"""Widths of latent attention that vLLM has kernels for, on a CPU too."""
OWN: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 259,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 16,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 259,
        "hidden_size_per_layer_input": 32,
    },
    "deepseek_v2": {
        **MLA,
        "topk_method": "group_limited_greedy",
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {**MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {"head_dim": 32},  # what its checkpoints say and transformers' config no longer has
    "glm4_moe_lite": {
        **MLA,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
    },
    "lfm2": {"block_dim": 128, "conv_dim": 128, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"block_dim": 128, "conv_dim": 128, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 1},
    "minicpm3": {"num_key_value_heads": 4},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
}


def small_config(family: str) -> Any:
    """The config of `family`, a `model_type` of transformers."""
    kind = CONFIG_MAPPING[family]
    default = kind()
    held = default.to_dict()
    small = {
        name: value
        for name, value in SMALL.items()
        if (name in held or hasattr(default, name)) and (held.get(name) is not None or name in ALWAYS)
    }
    if held.get("layer_types"):
        small["layer_types"] = None
    return kind(**small | OWN.get(family, {}))
