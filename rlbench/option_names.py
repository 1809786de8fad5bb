"""What other systems call options of ours. Any room may import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LIGHTRFT = {
    "actor_learning_rate": "lr",
    "actor_lr": "lr",
    "critic_learning_rate": "critic_lr",
    "adam_betas": "betas",
    "l2": "weight_decay",
    "packing_samples": "packing",
    "fused_linear_logprob": "head",
    "loss_agg_mode": "aggregation",
    "eps_clip": "clip_low",
    "eps_clip_high": "clip_high",
    "init_kl_coef": "kl_coef",
    "engine_mem_util": "gpu_memory_utilization",
    "disable_engine_sleep": "enable_engine_sleep",
    "generate_max_len": "max_tokens",
    "n_samples_per_prompt": "n",
    "target_modules": "lora_targets",
    "load_in_4bit": "lora_base",
    "sp_size": "sequence_parallel",
    "max_len": "pretrain_max_len",
    "use_reentrant": "gradient_checkpointing_use_reentrant",
    "initial_model_shard_size": "reference_shard_size",
    "heads_types": "heads",
}
"""Names of LightRFT's command line for options of ours; its command lines and namespaces write the first of several."""
TRL = {
    "learning_rate": "lr",
    "num_generations": "n",
    "max_completion_length": "max_tokens",
    "max_prompt_length": "prompt_max_len",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "beta": "kl_coef",
    "max_grad_norm": "max_norm",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
}
VERL = {
    "max_response_length": "max_tokens",
    "clip_ratio_low": "clip_low",
    "clip_ratio_high": "clip_high",
    "clip_grad": "max_norm",
    "kl_loss_coef": "kl_coef",
    "ulysses_sequence_parallel_size": "sequence_parallel",
    "use_prefix_grouper": "share_prompts",
}
ALIASES = {
    **LIGHTRFT,
    **TRL,
    **VERL,
    "max_new_tokens": "max_tokens",
    "ranks": "shards",
    "chat_template_kwargs": "template",
}
"""Other names of options, where the meaning is equal: TRL's, verl's, transformers'."""
MAPPINGS = ("template",)
"""Options that are mappings themselves."""
SWITCHES: Mapping[str, Mapping[bool, Any]] = {
    "fused_linear_logprob": {True: "chunked", False: "plain"},
    "disable_engine_sleep": {True: False, False: True},
    "load_in_4bit": {True: "nf4", False: None},
}
"""Aliases that are true or false, with what each means."""
