"""Command lines of a run, read as `rlbench train` reads them."""

from __future__ import annotations

import warnings

from rlbench.trainers.options.run_config import DEFAULTS, RunConfig, parse

OTHER_VALUES: dict[str, str] = {
    "pretrain": "a/model --prompt_data p.jsonl --reward math",
    "advantage_estimator": "rloo",
    "kl_estimator": "k2",
    "old_logprobs": "sampler",
    "mismatch": "icepop",
    "prompt_data_probs": "1.0 --prompt_data tiny",
    "lr_schedule": "constant",
    "max_steps": "3",
    "shards": "2",
    "kv_cache_bytes": "1000",
    "kl_target": "0.5",
    "clip_high": "0.3",
    "betas": "0.5 0.6",
    "top_p": "0.5",
    "first_token_temperature": "2.5 --use_fire",
    "gamma": "0.5",
    "lambd": "0.5",
    "ema_beta": "0.5",
    "high_entropy_token_ratio": "0.5",
    "remote_rm_url": "http://reward.example",
    "critic_pretrain": "a/critic --advantage_estimator gae",
    "use_kl_loss": " --kl_coef 0.1",
    "reward_running_norm_minus_mean": " --reward_running_norm",
    "ptx_coef": "0.1 --pretrain_data t.jsonl",
    "n": "5",
    "adam_offload": "",
    "gpu_memory_utilization": "0.7",
    "lora_alpha": "8",
    "lora_dropout": "0.5",
    "lora_base": "nf4 --lora_rank 4",
    "reference_shard_size": "1",
    "pretrain_data_probs": "1.0 --pretrain_data t.jsonl",
    "pretrain_max_len": "64",
    "track": "tensorboard",
    "head": "chunked",
    "share_prompts": " --packing",
    "aggregation": "token-mean",
    "engine_type": "sglang",
    "train_batch_size": "256",
    "seed": "7",
    "eval_steps": "3",
    "max_length": "64",
    "token_budget": "64",
    "loss": "dapo",
    "pooling": "attention",
    "probing_layer": "3",
    "heads": "quality style",
    "template": '{"mood":"!"}',
    "tools": '[{"name":"look"}]',
    "no_signal": "skip",
    "reward_failures": "0.5",
}
OF_TEXTS = ("data", "max_length", "token_budget")
OF_REWARDS = ("pooling", "probing_layer", "heads")


REFUSED_WHEN_SET = {"fsdp", "zero_stage", "zpg", "grad_accum_dtype", "overlap_comm", "local_rank"}


def run(*line: str, method: str = "grpo") -> RunConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parse([method, *line])


def method_of(name: str) -> str:
    """A method with which the option has an effect."""
    return "reward" if name in OF_REWARDS else "sft" if name in OF_TEXTS else "distill" if name == "teacher" else "grpo"


def words(name: str) -> list[str]:
    """A command line on which the option has another value than its default."""
    held = DEFAULTS[name]
    if name in OTHER_VALUES:
        return f"--{name} {OTHER_VALUES[name]}".split()
    if isinstance(held, bool):
        return [f"--no-{name}" if held else f"--{name}"]
    return [f"--{name}", str(held + 1) if isinstance(held, int | float) else "other"]
